"""The least sum of tables that share variables, exactly: one variable after the other is minimised away.

Each table has one dimension per variable that it depends on. A variable is left out by adding all tables that it is in
and taking the minimum along it; what that depends on is a new table. The variable with the smallest new table goes
first, so a chain costs what its links cost, and a graph as much as it is wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._errors import SearchError

Costs = NDArray[np.float64]
MOST = 20_000_000
"""Entries of a table that is not made: what it belongs to is too wide to be solved exactly."""


@dataclass(frozen=True)
class Table:
    """Costs, one dimension per variable, in the order of `variables`."""

    variables: tuple[int, ...]
    costs: Costs


def least(
    sizes: Sequence[int], tables: Sequence[Table], order: Sequence[int] | None = None
) -> tuple[float, tuple[int, ...]]:
    """The least sum over all choices of one of `sizes[v]` values for each variable v, and the choice.

    `order` is that of leaving, where it is known (`order_of`). Raises SearchError where variables hang together so
    widely that no table could hold it.

    >>> pair = Table((0, 1), np.array([[3.0, 1.0], [0.0, 5.0]]))
    >>> least((2, 2), [pair, Table((1,), np.array([2.0, 0.0]))])
    (1.0, (0, 1))
    """
    left, total = _Left(sizes, tables), 0.0
    steps: list[tuple[int, tuple[int, ...], Any]] = []
    for v in order_of(sizes, tables) if order is None else order:
        around, chosen, costs = left.without(v)
        steps.append((v, around, chosen))
        total += left.replace(v, around, costs)
    found: dict[int, int] = {}
    for v, around, chosen in reversed(steps):
        found[v] = int(chosen[tuple(found[u] for u in around)])
    return total, tuple(found[v] for v in range(len(sizes)))


def order_of(sizes: Sequence[int], tables: Sequence[Table]) -> tuple[int, ...]:
    """The order in which variables leave: each time the one whose leaving makes the smallest table."""
    near: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    for table in tables:
        for v in table.variables:
            near[v].update(u for u in table.variables if u != v)

    def width(v: int) -> int:
        return prod(sizes[u] for u in near[v]) * sizes[v]

    heap = [(width(v), v) for v in near]
    heapify(heap)
    order: list[int] = []
    while heap:
        least_width, v = heappop(heap)
        if v not in near or (now := width(v)) < least_width:
            continue
        if now > least_width:
            heappush(heap, (now, v))
            continue
        order.append(v)
        around = near.pop(v)
        for u in around:
            near[u] |= around
            near[u] -= {u, v}
            heappush(heap, (width(u), u))
    return tuple(order)


class _Left:
    """The tables that are left, and which variables are in which."""

    def __init__(self, sizes: Sequence[int], tables: Sequence[Table]) -> None:
        self.sizes = sizes
        self.tables: dict[int, Table] = dict(enumerate(tables))
        self._made = len(tables)
        self.of: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
        for n, table in self.tables.items():
            for v in table.variables:
                self.of[v].add(n)
        self._seen: dict[Any, tuple[list[Costs], Any, Costs]] = {}

    def without(self, v: int) -> tuple[tuple[int, ...], Any, Costs]:
        """The variables beside v, the best of v for each combination of them, and what that costs.

        What hangs together in the same way over the same tables has the same answer, the same object: layers that are
        repeated are worked out once.
        """
        around = tuple(sorted(self._around(v)))
        order = {u: n for n, u in enumerate((v, *around))}
        own = sorted(
            (id(t.costs), tuple(order[u] for u in t.variables), n) for n in self.of[v] for t in [self.tables[n]]
        )
        key = tuple(part[:2] for part in own), tuple(self.sizes[u] for u in order)
        if key not in self._seen:
            summed = self._joined(v, around)
            held = [self.tables[n].costs for n in self.of[v]]
            self._seen[key] = (held, np.argmin(summed, axis=0), np.min(summed, axis=0))
        _, chosen, costs = self._seen[key]
        return around, chosen, costs

    def _joined(self, v: int, around: tuple[int, ...]) -> Costs:
        """The sum of all tables with v, whose first dimension is v."""
        shape = tuple(self.sizes[u] for u in (v, *around))
        if prod(shape) > MOST:
            raise SearchError(
                "an exact choice", f"{len(around)} choices that depend on each other, {prod(shape):.3g} combinations",
                "they are looked at together", "marks for some of the tensors",
            )  # fmt: skip
        total = np.zeros(shape)
        for n in self.of[v]:
            total += aligned(self.tables[n], (v, *around))
        return total

    def replace(self, v: int, around: tuple[int, ...], costs: Costs) -> float:
        """Puts a table for those of v; what depends on nothing more is given back."""
        gone = self.of.pop(v)
        for u in around:
            self.of[u] -= gone
        for n in gone:
            del self.tables[n]
        if not around:
            return float(costs)
        n = self._made
        self._made += 1
        self.tables[n] = Table(around, costs)
        for u in around:
            self.of[u].add(n)
        return 0.0

    def _around(self, v: int) -> set[int]:
        return {u for n in self.of[v] for u in self.tables[n].variables} - {v}


def aligned(table: Table, order: tuple[int, ...]) -> Costs:
    """The table with a dimension for each variable of `order`, of size one where it depends on none."""
    places = [order.index(v) for v in table.variables]
    moved = np.transpose(table.costs, np.argsort(places))
    shape = [1] * len(order)
    for at, size in zip(sorted(places), moved.shape, strict=True):
        shape[at] = size
    return moved.reshape(shape)
