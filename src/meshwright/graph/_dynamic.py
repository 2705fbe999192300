"""Sizes that may change from call to call: symbols while a program is recorded, inputs of it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from meshwright.layout import Spec, axes_of
from meshwright.tensor import DistTensor

from ._node import Value
from ._recording import Recording
from .torch_hooks import FakeMode, conditions, symbolic_size

Fits = Callable[[Sequence[Any]], bool]


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The size of a dim of a leaf of the batch, of the whole tensor, divided by the ranks that cut it."""

    leaf: int
    dim: int
    ranks: int

    def __call__(self, leaves: Sequence[Any]) -> int:
        x = leaves[self.leaf]
        shape = x.spec.shape if isinstance(x, DistTensor) else x.shape
        return int(shape[self.dim]) // self.ranks

    def divides(self, leaves: Sequence[Any]) -> bool:
        """True when the ranks that cut the dim get parts of one size."""
        return self(leaves) * self.ranks == BatchSize(self.leaf, self.dim, 1)(leaves)

    def __repr__(self) -> str:
        return f"size of batch {self.leaf} along dim {self.dim}" + (f" / {self.ranks}" if self.ranks > 1 else "")


class DynamicSizes:
    """The symbols of a capture. Dims of equal size, cut alike, share one: inputs and labels have one batch size.

    A dim that mesh axes cut is a multiple of the ranks that cut it, so that parts have one size.
    """

    def __init__(self, mode: FakeMode, recording: Recording, dynamic: Mapping[int, Collection[int]]) -> None:
        self.dynamic = dynamic
        self._mode, self._recording = mode, recording
        self._symbols: dict[tuple[int, int], Any] = {}
        self.values: dict[Value, Any] = {}
        """Input → its symbol."""

    def of(self, x: Tensor, leaf: int) -> tuple[Any, ...]:
        """The shape of a leaf of the batch, with symbols for the sizes that may change."""
        spec = x.spec if isinstance(x, DistTensor) else None
        dims = {d % x.dim() for d in self.dynamic.get(leaf, ())}
        return tuple(self._size(n, leaf, d, _ranks(spec, d)) if d in dims else n for d, n in enumerate(x.shape))

    def _size(self, n: int, leaf: int, dim: int, ranks: int) -> Any:
        if n % ranks or n // ranks < 2:
            return n
        found = self._symbols.get((n, ranks))
        if found is None:
            name = f"size_{len(self._symbols)}"
            found = self._symbols[n, ranks] = symbolic_size(self._mode, name, n // ranks)
            self.values[self._recording.add_number(found, "size", name, BatchSize(leaf, dim, ranks))] = found
        return found * ranks


def _ranks(spec: Spec | None, dim: int) -> int:
    return prod(spec.mesh.sizes[a] for a in axes_of(spec.layout.dims[dim])) if spec is not None else 1


def sizes_hold(mode: FakeMode, inputs: Mapping[Value, Any], sources: Mapping[Value, BatchSize]) -> Fits:
    """Tells of the leaves of a batch whether what was recorded for symbolic sizes is right for theirs.

    Recording notes every comparison that it had to decide by the sizes it saw; the same must come out.
    """
    symbols = {symbol.node.expr: sources[v] for v, symbol in inputs.items()}
    guards = [g for g in conditions(mode) if g.free_symbols and g.free_symbols <= set(symbols)]

    def fits(leaves: Sequence[Any]) -> bool:
        values: dict[Any, int] = {}
        for symbol, source in symbols.items():
            size = source(leaves)
            if size < 2 or not source.divides(leaves):
                return False
            values[symbol] = size
        return all(bool(g.xreplace(values)) for g in guards)

    return fits
