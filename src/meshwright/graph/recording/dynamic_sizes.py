"""Dynamic sizes, which may change from call to call: symbols during recording, inputs of the program afterwards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any

from torch import SymInt, Tensor

from meshwright.layout import Spec, TorchValue, axes_of
from meshwright.tensor import DistTensor

from ..program.node import Value
from ..torch_hooks import FakeMode, conditions, symbolic_size
from .recording import Recording
from .size_expressions import CONDITIONS, ExpressionError, Row, Rows, evaluate_rows

BatchPredicate = Callable[[Sequence[Any]], bool]


@dataclass(frozen=True, slots=True)
class BatchSize:
    """Size of a dim of a leaf of the batch: the global size divided by the number of ranks that shard the dim."""

    leaf: int
    dim: int
    ranks: int

    def __call__(self, leaves: Sequence[Any]) -> int:
        x = leaves[self.leaf]
        shape = x.spec.shape if isinstance(x, DistTensor) else x.shape
        return int(shape[self.dim]) // self.ranks

    def divides(self, leaves: Sequence[Any]) -> bool:
        """True if the ranks that shard the dim have parts of equal size."""
        return self(leaves) * self.ranks == BatchSize(self.leaf, self.dim, 1)(leaves)

    def __repr__(self) -> str:
        return f"size of batch {self.leaf} along dim {self.dim}" + (f" / {self.ranks}" if self.ranks > 1 else "")


class DynamicSizes:
    """The symbols of a capture. Dims of equal size and equal sharding share a symbol, as inputs and labels do.

    A sharded dim is a multiple of the number of ranks that shard it, so that all parts have one size.
    """

    def __init__(self, mode: FakeMode, recording: Recording, dynamic: Mapping[int, Collection[int]]) -> None:
        self.dynamic = dynamic
        self._mode, self._recording = mode, recording
        self._symbols: dict[tuple[int, int], Any] = {}
        self.values: dict[Value, Any] = {}
        """Input value → its symbol."""
        self.open: list[tuple[BatchSize, Any]] = []
        """The dims that may change, each with its captured size: a symbol, or a constant number."""

    def of(self, x: Tensor, leaf: int) -> tuple[Any, ...]:
        """Return the shape of a leaf of the batch, with symbols for the sizes that may change."""
        spec = x.spec if isinstance(x, DistTensor) else None
        dims = {d % x.dim() for d in self.dynamic.get(leaf, ())}
        return tuple(self._size(n, leaf, d, _ranks(spec, d)) if d in dims else n for d, n in enumerate(x.shape))

    def _size(self, n: int, leaf: int, dim: int, ranks: int) -> int | SymInt:
        if n % ranks or n // ranks < 2:
            self.open.append((BatchSize(leaf, dim, 1), n))
            return n
        found = self._symbols.get((n, ranks))
        if found is None:
            name = f"size_{len(self._symbols)}"
            found = self._symbols[n, ranks] = symbolic_size(self._mode, name, n // ranks)
            self.values[self._recording.add_number(found, "size", name, BatchSize(leaf, dim, ranks))] = found
        self.open.append((BatchSize(leaf, dim, ranks), found))
        return found * ranks


def _ranks(spec: Spec | None, dim: int) -> int:
    return prod(spec.mesh.sizes[a] for a in axes_of(spec.layout.dims[dim])) if spec is not None else 1


@dataclass(frozen=True, slots=True)
class SizeConditions:
    """Predicate on the leaves of a batch: True if a program recorded with symbolic sizes is valid for their sizes.

    Recording notes every comparison that it decided by the sizes it saw; each must have the same result. `conditions`
    are names of `rows`, which are functions of the `sizes`. Each dim in `bound` must equal the size of that name, or a
    number. So dims that share a symbol stay equal, and dims that could not be symbolic keep their size.
    """

    sizes: Mapping[str, BatchSize]
    rows: tuple[Row, ...] = ()
    conditions: tuple[str, ...] = ()
    bound: tuple[tuple[BatchSize, str | int], ...] = ()

    def __call__(self, leaves: Sequence[Any]) -> bool:
        values = {name: size(leaves) for name, size in self.sizes.items()}
        if any(n < 2 for n in values.values()) or not all(size.divides(leaves) for size in self.sizes.values()):
            return False
        return self._bound_dims_fit(leaves, values) and self._conditions_hold(values)

    def _bound_dims_fit(self, leaves: Sequence[Any], values: Mapping[str, int]) -> bool:
        wanted = ((size, values[n] if isinstance(n, str) else n) for size, n in self.bound)
        return all(size.divides(leaves) and size(leaves) == n for size, n in wanted)

    def _conditions_hold(self, values: Mapping[str, int]) -> bool:
        try:
            found = evaluate_rows(self.rows, values, CONDITIONS)
        except (ValueError, ArithmeticError, TypeError):  # a division by a size of zero
            return False
        return all(found[name] for name in self.conditions)

    def as_data(self) -> dict[str, Any]:
        """Return the predicate as plain data, which `read_size_conditions` reads."""
        sizes = {name: [size.leaf, size.dim, size.ranks] for name, size in self.sizes.items()}
        bound = [[size.leaf, size.dim, size.ranks, n] for size, n in self.bound]
        rows = [list(row) for row in self.rows]
        return {"sizes": sizes, "rows": rows, "conditions": list(self.conditions), "bound": bound}


def read_size_conditions(data: Mapping[str, Any]) -> SizeConditions:
    """Return the predicate that `as_data` wrote.

    Raises ExpressionError for an unknown condition, and Python errors for data of another structure.
    """
    sizes = {name: BatchSize(*map(index, size)) for name, size in data["sizes"].items()}
    rows, conditions = tuple(map(tuple, data["rows"])), tuple(data["conditions"])
    if not set(conditions) <= {f"e{at}" for at in range(len(rows))}:
        raise ExpressionError("a condition that no row computes")
    bound = tuple((BatchSize(*map(index, size)), n if n in sizes else index(n)) for *size, n in data["bound"])
    return SizeConditions(sizes, rows, conditions, bound)


def size_conditions(
    mode: FakeMode,
    inputs: Mapping[Value, Any],
    sources: Mapping[Value, BatchSize],
    opened: Sequence[tuple[BatchSize, Any]],
) -> SizeConditions:
    """Return the conditions under which the recorded program is valid for other sizes."""
    symbols = {symbol.node.expr: symbol for symbol in inputs.values()}
    rows = Rows(str, CONDITIONS)
    found: list[str] = []
    for guard in dict.fromkeys(conditions(mode)):
        if guard.free_symbols and guard.free_symbols <= set(symbols):
            found += _rows_of(guard, rows, symbols)
    sizes = {str(symbol.node.expr): sources[v] for v, symbol in inputs.items()}
    bound = tuple((size, n if isinstance(n, int) else str(n.node.expr)) for size, n in opened)
    return SizeConditions(sizes, tuple(rows.rows), tuple(dict.fromkeys(found)), bound)


def _rows_of(guard: TorchValue, rows: Rows, symbols: Mapping[Any, Any]) -> list[str]:
    """Return the name of the row of the condition.

    For a condition that cannot be written, return rows that require the recorded sizes.
    """
    try:
        return [str(rows.of(guard))]
    except ExpressionError:
        return [rows.add("Equality", rows.of(s), symbols[s].node.hint) for s in guard.free_symbols]
