"""Caches of transformers whose layers write new keys and values in place.

A `DynamicLayer` of transformers concatenates its keys with the new ones, and so copies the whole cache for each token.
Here such layers get memory for all positions, in the layout of their keys, and write the new ones into it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import world_ranks
from meshwright.engine import dtensor_from_local
from meshwright.layout import Partial, Shard
from meshwright.tensor import DistTensor

_KEYS = {"DynamicLayer", "DynamicSlidingWindowLayer"}
"""Classes of transformers for layers of a cache that hold keys and values."""
KINDS = {*_KEYS, "InPlaceLayer"}
"""Classes of layers that hold keys and values as tensors; prompts that are read in chunks leave layers in place."""


class PositionMemory:
    """Memory for `capacity` positions along dim -2, of which the first ones are written."""

    def __init__(self, held: Tensor, capacity: int) -> None:
        self.memory = _zeros_like(held, capacity)
        self.shown = self.append(held, 0)

    def append(self, new: Tensor, at: int) -> Tensor:
        """Write the tensor from position `at` on, and return all positions so far: a view of the memory."""
        dim, end = self.memory.dim() - 2, at + new.shape[-2]
        self.memory.index_copy_(dim, torch.arange(at, end, device=new.device), new)
        self.shown = self.memory.narrow(dim, 0, end)
        return self.shown

    def takes(self, held: Tensor, new: Tensor) -> bool:
        """True if `held` is what the memory shows, and `new` fits behind it with the same dtype and layout."""
        fits = held.shape[-2] + new.shape[-2] <= self.memory.shape[-2]
        is_alike = new.dtype == self.memory.dtype and _placements(new) == _placements(self.memory)
        return held is self.shown and fits and is_alike


def holds_keys_only(cache: Any) -> bool:
    """True if all layers of a cache hold keys and values, so that a prompt may be read in several calls.

    The layers of state-space models take several tokens without a state, and one token with it.
    """
    layers = getattr(cache, "layers", None) or ()
    kinds = [{kind.__name__ for kind in type(layer).__mro__[:2]} for layer in layers]
    return bool(kinds) and all(names & _KEYS for names in kinds)


def write_in_place(cache: Any, capacity: int) -> None:
    """Give the growing layers of a cache of transformers memory for `capacity` positions; other layers stay."""
    for part in (cache, getattr(cache, "self_attention_cache", None)):
        for layer in getattr(part, "layers", None) or ():
            kind = type(layer)
            if kind.__name__ == "DynamicLayer" and kind.__module__ == "transformers.cache_utils":
                layer.capacity, layer.memory = capacity, None
                layer.__class__ = _in_place(kind)


@lru_cache(maxsize=8)
def _in_place(kind: Any) -> Any:
    """Return the class of a growing layer that writes in place."""

    class InPlaceLayer(kind):
        """A layer with memory for `capacity` positions; it grows as before where it cannot write in place."""

        _layer_type = None  # transformers registers each subclass that names a type of layers
        capacity: int
        memory: tuple[PositionMemory, PositionMemory] | None

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            at = self.get_seq_length()
            if torch.is_grad_enabled() or not at:
                self.memory = None
                return super().update(key_states, value_states, *args, **kwargs)
            held, new = (self.keys, self.values), (key_states, value_states)
            fits = at + key_states.shape[-2] <= self.capacity
            if self.memory is None and fits and all(map(may_be_written, held)):
                self.memory = PositionMemory(held[0], self.capacity), PositionMemory(held[1], self.capacity)
                held = self.keys, self.values = self.memory[0].shown, self.memory[1].shown
            if self.memory is None or not all(m.takes(*pair) for m, *pair in zip(self.memory, held, new, strict=True)):
                self.memory, self.capacity = None, 0  # after another one changed the keys, as in a search by beams
                return super().update(key_states, value_states, *args, **kwargs)
            self.keys, self.values = (m.append(x, at) for m, x in zip(self.memory, new, strict=True))
            return self.keys, self.values

    return InPlaceLayer


def may_be_written(x: Tensor) -> bool:
    """True if all ranks hold parts of the tensor, each with all positions along dim -2, and none is a term of a sum."""
    if not isinstance(x, DistTensor):
        return True
    if x.mesh.size < len(world_ranks()):
        return False
    return not any(isinstance(p, Partial) or p == Shard(x.dim() - 2) for p in x.placements)


def _placements(x: Tensor) -> Any:
    return x.placements if isinstance(x, DistTensor) else None


def _zeros_like(x: Tensor, positions: int) -> Tensor:
    """Return zeros for this number of positions along dim -2, in the layout of `x`."""
    part = x.to_local() if isinstance(x, DistTensor) else x
    zeros = part.new_zeros(*part.shape[:-2], positions, part.shape[-1])
    if not isinstance(x, DistTensor):
        return zeros
    return dtensor_from_local(zeros, x.mesh, x.placements, shape=(*x.shape[:-2], positions, x.shape[-1]))
