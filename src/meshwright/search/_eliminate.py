"""The least sum of tables that share variables, exactly: one variable after the other is minimised away.

Each table has one dimension per variable that it depends on. A variable is left out by adding all tables that it is in
and taking the minimum along it; what that depends on is a new table. The variable with the smallest new table goes
first, so a chain costs what its links cost, and a graph as much as it is wide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
MOST = 20_000_000
"""Entries of a table that is not made: what it belongs to is too wide to be solved exactly."""
PARTS = 2**14
"""Entries of the tables that a variable leaves in parts, where it has to."""
ROUNDS = 4
"""So often a choice is made better, where it is not known to be the best."""


@dataclass(frozen=True)
class Table:
    """Costs, one dimension per variable, in the order of `variables`."""

    variables: tuple[int, ...]
    costs: Costs


class Order(NamedTuple):
    """The order in which variables leave, and the entries of the largest table on the way."""

    variables: tuple[int, ...]
    widest: int


class Least(NamedTuple):
    """A sum, the choice that it is of, and what no choice goes below: the same number where none is better."""

    value: float
    chosen: tuple[int, ...]
    bound: float


def least(sizes: Sequence[int], tables: Sequence[Table], order: Order | None = None, most: int = MOST) -> Least:
    """The least sum over all choices of one of `sizes[v]` values for each variable v, and the choice.

    `order` is that of leaving, where it is known (`order_of`). Where variables hang together so widely that a table
    would have more than `most` entries, they leave it in parts, each with the value that is best for it (mini-buckets,
    Dechter and Rish 2003): that gives a bound, and a choice, which is then made better while that goes on.

    >>> pair = Table((0, 1), np.array([[3.0, 1.0], [0.0, 5.0]]))
    >>> least((2, 2), [pair, Table((1,), np.array([2.0, 0.0]))]).chosen
    (0, 1)
    """
    order = order or order_of(sizes, tables, most)
    if order.widest > most:
        most = min(most, PARTS)
        order = order_of(sizes, tables, most)
    bound, chosen, parted = _eliminated(sizes, tables, order, most)
    if not parted:
        return Least(bound, chosen, bound)
    value = _sum(tables, chosen)
    for _ in range(ROUNDS):
        fixed = [_fixed(table, {v: chosen[v] for v in parted}) for table in tables]
        left = [1 if v in parted else n for v, n in enumerate(sizes)]
        _, again, _ = _eliminated(left, fixed, order_of(left, fixed, most), most)
        again = tuple(chosen[v] if v in parted else n for v, n in enumerate(again))
        again = _descended(sizes, tables, min(chosen, again, key=lambda c: _sum(tables, c)))
        if not (now := _sum(tables, again)) < value:
            break
        value, chosen = now, again
    return Least(value, chosen, min(bound, value))


def _eliminated(
    sizes: Sequence[int], tables: Sequence[Table], order: Order, most: int
) -> tuple[float, tuple[int, ...], set[int]]:
    """A bound, a choice, and the variables that left in parts; without any, the bound is what the choice takes."""
    left, total = _Left(sizes, tables, most), 0.0
    steps: list[_Step] = []
    for v in order.variables:
        step = left.without(v)
        steps.append(step)
        total += left.replace(step)
    found: dict[int, int] = {}
    for step in reversed(steps):
        found[step.v] = step.value(found)
    return total, tuple(found[v] for v in range(len(sizes))), {step.v for step in steps if len(step.parts) > 1}


def _sum(tables: Sequence[Table], chosen: Sequence[int]) -> float:
    return sum(float(table.costs[tuple(chosen[v] for v in table.variables)]) for table in tables)


def _fixed(table: Table, values: Mapping[int, int]) -> Table:
    """The table with one entry left of each variable whose value is given."""
    if values.keys().isdisjoint(table.variables):
        return table
    kept = tuple(slice(values[v], values[v] + 1) if v in values else slice(None) for v in table.variables)
    return Table(table.variables, table.costs[kept])


def _descended(sizes: Sequence[int], tables: Sequence[Table], chosen: Sequence[int]) -> tuple[int, ...]:
    """The choice after each variable took what is best beside the others, again and again."""
    of: list[list[Table]] = [[] for _ in sizes]
    for table in tables:
        for v in table.variables:
            of[v].append(table)
    now, waiting = [*chosen], {*range(len(sizes))}
    while waiting:
        v = waiting.pop()
        costs = sum(t.costs[tuple(slice(None) if u == v else now[u] for u in t.variables)] for t in of[v])
        best = int(np.argmin(costs)) if of[v] else now[v]
        if of[v] and np.asarray(costs)[best] < np.asarray(costs)[now[v]]:
            now[v] = best
            waiting |= {u for t in of[v] for u in t.variables} - {v}
    return tuple(now)


def order_of(sizes: Sequence[int], tables: Sequence[Table], most: int = MOST) -> Order:
    """The order in which variables leave: each time the one whose leaving makes the smallest table.

    One that leaves in parts is taken to bring nothing together.
    """
    near: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    for table in tables:
        for v in table.variables:
            near[v].update(u for u in table.variables if u != v)

    def width(v: int) -> int:
        return prod(sizes[u] for u in near[v]) * sizes[v]

    heap = [(width(v), v) for v in near]
    heapify(heap)
    order, widest = list[int](), 0
    while heap:
        least_width, v = heappop(heap)
        if v not in near or (now := width(v)) < least_width:
            continue
        if now > least_width:
            heappush(heap, (now, v))
            continue
        order.append(v)
        widest = max(widest, now)
        around = near.pop(v)
        for u in around:
            near[u] |= around if now <= most else set()
            near[u] -= {u, v}
            heappush(heap, (width(u), u))
    return Order(tuple(order), widest)


class _Part(NamedTuple):
    """Some tables of a variable: what they depend on beside it, the best value for each case, and what that costs."""

    around: tuple[int, ...]
    chosen: Any
    costs: Costs


@dataclass(frozen=True, slots=True)
class _Step:
    """A variable leaves: in one part, or in several, whose best values may differ; then its tables are asked."""

    v: int
    parts: tuple[_Part, ...]
    tables: tuple[Table, ...] = ()

    def value(self, found: Mapping[int, int]) -> int:
        """The best value where those of the variables around are known."""
        if len(self.parts) == 1:
            (part,) = self.parts
            return int(part.chosen[tuple(found[u] for u in part.around)])
        rows = (t.costs[tuple(slice(None) if u == self.v else found[u] for u in t.variables)] for t in self.tables)
        return int(np.argmin(sum(rows)))


class _Left:
    """The tables that are left, and which variables are in which."""

    def __init__(self, sizes: Sequence[int], tables: Sequence[Table], most: int) -> None:
        self.sizes, self.most = sizes, most
        self.tables: dict[int, Table] = dict(enumerate(tables))
        self._made = len(tables)
        self.of: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
        for n, table in self.tables.items():
            for v in table.variables:
                self.of[v].add(n)
        self._seen: dict[Any, tuple[list[Costs], Any, Costs]] = {}

    def without(self, v: int) -> _Step:
        """The variable's leaving, of all its tables at once where they are small enough together."""
        groups = [sorted(self.of[v])] if self._width(v, self.of[v]) <= self.most else self._groups(v)
        parts = tuple(self._part(v, group) for group in groups)
        return _Step(v, parts, tuple(self.tables[n] for n in sorted(self.of[v])) if len(parts) > 1 else ())

    def _groups(self, v: int) -> list[list[int]]:
        """The tables of v in groups that are small enough, the largest first."""
        groups: list[list[int]] = []
        for n in sorted(self.of[v], key=lambda n: (-self.tables[n].costs.size, n)):
            fitting = (g for g in groups if self._width(v, [*g, n]) <= self.most)
            group = next(fitting, None)
            if group is None:
                groups.append([n])
            else:
                group.append(n)
        return groups

    def _width(self, v: int, group: Iterable[int]) -> int:
        return prod(self.sizes[u] for u in self._around(v, group)) * self.sizes[v]

    def _part(self, v: int, group: Sequence[int]) -> _Part:
        """The variables beside v, the best of v for each combination of them, and what that costs.

        What hangs together in the same way over the same tables has the same answer, the same object: layers that are
        repeated are worked out once.
        """
        around = tuple(sorted(self._around(v, group)))
        order = {u: n for n, u in enumerate((v, *around))}
        own = sorted((id(t.costs), tuple(order[u] for u in t.variables)) for n in group for t in [self.tables[n]])
        key = tuple(own), tuple(self.sizes[u] for u in order)
        if key not in self._seen:
            summed = np.zeros(tuple(self.sizes[u] for u in (v, *around)))
            for n in group:
                summed += aligned(self.tables[n], (v, *around))
            held = [self.tables[n].costs for n in group]
            self._seen[key] = (held, np.argmin(summed, axis=0), np.min(summed, axis=0))
        _, chosen, costs = self._seen[key]
        return _Part(around, chosen, costs)

    def replace(self, step: _Step) -> float:
        """Puts tables for those of the variable; what depends on nothing more is given back."""
        gone, done = self.of.pop(step.v), 0.0
        for u in {u for part in step.parts for u in part.around}:
            self.of[u] -= gone
        for n in gone:
            del self.tables[n]
        for part in step.parts:
            if not part.around:
                done += float(part.costs)
                continue
            self.tables[self._made] = Table(part.around, part.costs)
            for u in part.around:
                self.of[u].add(self._made)
            self._made += 1
        return done

    def _around(self, v: int, group: Iterable[int]) -> set[int]:
        return {u for n in group for u in self.tables[n].variables} - {v}


def aligned(table: Table, order: tuple[int, ...]) -> Costs:
    """The table with a dimension for each variable of `order`, of size one where it depends on none."""
    places = [order.index(v) for v in table.variables]
    moved = np.transpose(table.costs, np.argsort(places))
    shape = [1] * len(order)
    for at, size in zip(sorted(places), moved.shape, strict=True):
        shape[at] = size
    return moved.reshape(shape)
