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


def least(sizes: Sequence[int], tables: Sequence[Table]) -> tuple[float, tuple[int, ...]]:
    """The least sum over all choices of one of `sizes[v]` values for each variable v, and the choice.

    Raises SearchError where variables hang together so widely that no table could hold it.

    >>> pair = Table((0, 1), np.array([[3.0, 1.0], [0.0, 5.0]]))
    >>> least((2, 2), [pair, Table((1,), np.array([2.0, 0.0]))])
    (1.0, (0, 1))
    """
    left = _Left(sizes, tables)
    total, order = 0.0, list[tuple[int, tuple[int, ...], Any]]()
    while (v := left.next()) is not None:
        around, summed = left.joined(v)
        chosen = np.argmin(summed, axis=0)
        order.append((v, around, chosen))
        total += left.replace(v, around, np.min(summed, axis=0))
    found: dict[int, int] = {}
    for v, around, chosen in reversed(order):
        found[v] = int(chosen[tuple(found[u] for u in around)])
    return total, tuple(found[v] for v in range(len(sizes)))


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
        self.heap = [(self._width(v), v) for v in self.of]
        heapify(self.heap)

    def next(self) -> int | None:
        """The variable whose leaving makes the smallest table."""
        while self.heap:
            width, v = heappop(self.heap)
            if v not in self.of:
                continue
            now = self._width(v)
            if now <= width:
                return v
            heappush(self.heap, (now, v))
        return None

    def joined(self, v: int) -> tuple[tuple[int, ...], Costs]:
        """The variables beside v, and the sum of all tables with v, whose first dimension is v."""
        around = tuple(sorted(self._around(v)))
        shape = tuple(self.sizes[u] for u in (v, *around))
        if prod(shape) > MOST:
            raise SearchError(
                "an exact choice", f"{len(around)} choices that depend on each other, {prod(shape):.3g} combinations",
                "they are looked at together", "marks for some of the tensors",
            )  # fmt: skip
        total = np.zeros(shape)
        for n in self.of[v]:
            total += _aligned(self.tables[n], (v, *around))
        return around, total

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
            heappush(self.heap, (self._width(u), u))
        return 0.0

    def _around(self, v: int) -> set[int]:
        return {u for n in self.of[v] for u in self.tables[n].variables} - {v}

    def _width(self, v: int) -> int:
        return prod(self.sizes[u] for u in self._around(v)) * self.sizes[v]


def _aligned(table: Table, order: tuple[int, ...]) -> Costs:
    """The table with a dimension for each variable of `order`, of size one where it depends on none."""
    places = [order.index(v) for v in table.variables]
    moved = np.transpose(table.costs, np.argsort(places))
    shape = [1] * len(order)
    for at, size in zip(sorted(places), moved.shape, strict=True):
        shape[at] = size
    return moved.reshape(shape)
