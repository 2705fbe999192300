"""The decode step as a module: one token for each row, with memory for the keys and values of all positions.

The keys of a row's position s are in column s of its memory. A step writes the column of its position, and attends to
the columns up to there. So one program serves all lengths of the cache, and rows may have different lengths.

Shapes: r rows, h heads, s positions, d features of a head, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.engine import dtensor_from_local
from meshwright.tensor import DistTensor

from ._cache import KINDS, may_be_written
from ._pages import PagePool
from ._rows import Rows

_PARTS = ("keys", "values")
Append = Callable[[Tensor, Tensor], Tensor]
"""`append(memory, new)` writes the keys of one position in each row, and returns those of all columns [r, h, s, d]."""


@dataclass(frozen=True, slots=True)
class RowCopy:
    """A row of a cache, `source`, of which a slot gets the positions from `first` on; position 0 is in column `start`.

    Both numbers of rows are those of this rank.
    """

    slot: int
    source: int
    start: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class StepSize:
    """The rows of a step, the number of positions of a row, and the pages of a rank; None for a step without pages."""

    rows: Rows
    capacity: int
    pool: PagePool | None = None


class DecodeStep(nn.Module):
    """A step of a model of transformers. `logits` has the logits [r, v] after the last call.

    The logits are a buffer, not a result: the result of a program is gathered on every rank.
    """

    logits: Tensor

    def __init__(self, model: nn.Module, layers: Sequence[Any], size: StepSize, logits_rv: Tensor) -> None:
        super().__init__()
        rows, pool = size.rows, size.pool
        self.model, self.size, self.rows, self.count = model, size, rows, len(layers)
        shape = (rows, size.capacity) if pool is None else (rows.of_ranks, pool.positions)
        for at, layer in enumerate(layers):
            for name in _PARTS:
                self.register_buffer(f"{name}_{at}", _memory(getattr(layer, name), *shape), False)
        self.register_buffer("logits", rows.zeros(logits_rv, logits_rv.shape[1]), False)

    def forward(self, tokens_r1: Tensor, places_r1: Tensor) -> Tensor:
        memory = [(getattr(self, f"keys_{at}"), getattr(self, f"values_{at}")) for at in range(self.count)]
        keys = memory[0][0]
        columns_s = torch.arange(self.columns, device=keys.device)
        hidden_r11s = columns_s > places_r1[:, None, None]
        mask_r11s = torch.zeros_like(hidden_r11s, dtype=keys.dtype)
        out = self.model(
            input_ids=tokens_r1,
            attention_mask=mask_r11s.masked_fill(hidden_r11s, torch.finfo(keys.dtype).min),
            position_ids=places_r1,
            past_key_values=_cache(memory, self.append(places_r1)),
            use_cache=True,
        )
        self.logits.copy_(out.logits[:, -1])
        return places_r1.new_zeros(())

    @property
    def columns(self) -> int:
        """Number of columns that attention reads."""
        return self.size.capacity

    def append(self, places_r1: Tensor) -> Append:
        """Return the function that writes the keys of these positions to the memory of a layer."""

        def append(memory_rhsd: Tensor, new_rh1d: Tensor) -> Tensor:
            return memory_rhsd.scatter_(2, places_r1[:, None, :, None].expand(new_rh1d.shape), new_rh1d)

        return append

    def fits(self, layers: Sequence[Any], size: StepSize) -> bool:
        """True if the memory has the sizes, dtypes and layouts of a cache for these rows."""
        if (size, len(layers)) != (self.size, self.count):
            return False
        pairs = ((getattr(self, f"{name}_{at}"), getattr(x, name)) for at, x in enumerate(layers) for name in _PARTS)
        return all(_kind(memory) == _kind(held) for memory, held in pairs)

    def fill(self, layers: Sequence[Any], copies: Sequence[RowCopy]) -> None:
        """Copy rows of a cache into the memory."""
        for at, layer in enumerate(layers):
            for name in _PARTS:
                memory, held = (local(x) for x in (getattr(self, f"{name}_{at}"), getattr(layer, name)))
                for copy in copies:
                    self.write(memory, copy, held[copy.source, :, copy.start + copy.first :])

    def write(self, memory: Tensor, copy: RowCopy, new_hsd: Tensor) -> None:
        """Write keys from position `copy.first` on to the rank's part of the memory of a layer."""
        memory[copy.slot, :, copy.first : copy.first + new_hsd.shape[1]] = new_hsd


def why_no_steps(layers: Sequence[Any], rows: Rows, capacity: int) -> str:
    """Return why no decode step can take the rows of a cache with these layers; "" if one can."""
    if not layers:
        return "the model has no cache of transformers"
    for layer in layers:
        kind, window = type(layer).__name__, getattr(layer, "sliding_window", capacity)
        if kind not in KINDS:
            return f"the cache of the model has a {kind}"
        if window < capacity:
            return f"the cache of the model keeps the last {window} positions only"
        if not all(may_be_written(x) and rows.holds(x) for x in (layer.keys, layer.values)):
            return "the keys are pending sums, are sharded over positions, or are on other ranks than the rows"
    return ""


def _cache(memory: Sequence[tuple[Tensor, Tensor]], append: Append) -> Any:
    """Return a cache of transformers whose layers write into the memory."""
    made, kind = import_module("transformers.cache_utils").DynamicCache(), _step_layer()
    made.layers = [kind(keys, values, append) for keys, values in memory]
    return made


@lru_cache(maxsize=1)
def _step_layer() -> Any:
    """Return the class of the layers of a decode step's cache."""
    kind: Any = import_module("transformers.cache_utils").DynamicLayer

    class StepLayer(kind):
        """A layer that writes the keys and values of one position in each row, and returns those of all columns."""

        _layer_type = None  # transformers registers each subclass that names a type of layers

        def __init__(self, keys: Tensor, values: Tensor, append: Append) -> None:
            super().__init__()
            self.keys, self.values, self.append = keys, values, append
            self.is_initialized = True

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            append, dtype = self.append, self.keys.dtype
            return append(self.keys, key_states.to(dtype)), append(self.values, value_states.to(dtype))

    return StepLayer


def _memory(held: Tensor, rows: Rows, capacity: int) -> Tensor:
    """Return zeros [r, h, capacity, d] for these rows, in the layout of `held`."""
    heads, features = held.shape[1], held.shape[3]
    if not isinstance(held, DistTensor):
        return held.new_zeros(rows.count, heads, capacity, features)
    part = held.to_local()
    local = part.new_zeros(rows.held, part.shape[1], capacity, part.shape[3])
    return dtensor_from_local(local, held.mesh, held.placements, shape=(rows.count, heads, capacity, features))


def _kind(x: Tensor) -> Any:
    """Return the sizes other than rows and positions, the dtype, and the layout."""
    layout = (x.mesh, x.placements) if isinstance(x, DistTensor) else None
    return x.shape[1], x.shape[3], x.dtype, x.device, layout


def local(x: Tensor) -> Tensor:
    """Return this rank's part."""
    return x.to_local() if isinstance(x, DistTensor) else x
