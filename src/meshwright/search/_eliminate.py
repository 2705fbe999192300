"""The least sum of tables that share variables, exactly: one variable after the other is minimised away.

Each table has one dimension per variable that it depends on. A variable is left out by adding all tables that it is in
and taking the minimum along it; what that depends on is a new table. The variable with the smallest new table goes
first, so a chain costs what its links cost, and a graph as much as it is wide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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


def least(sizes: Sequence[int], tables: Sequence[Table], steps: Elimination | None = None, most: int = MOST) -> Least:
    """The least sum over all choices of one of `sizes[v]` values for each variable v, and the choice.

    `steps` are those of the elimination, where they are known (`elimination`). Where variables hang together so widely
    that a table would have more than `most` entries, they leave it in parts, each with the value that is best for it
    (mini-buckets, Dechter and Rish 2003): that gives a bound, and a choice, which is then made better while that goes
    on.

    >>> pair = Table((0, 1), np.array([[3.0, 1.0], [0.0, 5.0]]))
    >>> least((2, 2), [pair, Table((1,), np.array([2.0, 0.0]))]).chosen
    (0, 1)
    """
    steps = steps or elimination(sizes, tables, most)
    bound, chosen = steps.carried_out(tables)
    if not steps.parted:
        return Least(bound, chosen, bound)
    value, parted, most = _sum(tables, chosen), steps.parted, steps.most
    for _ in range(ROUNDS):
        fixed = [_fixed(table, {v: chosen[v] for v in parted}) for table in tables]
        left = [1 if v in parted else n for v, n in enumerate(sizes)]
        _, again = elimination(left, fixed, most).carried_out(fixed)
        again = tuple(chosen[v] if v in parted else n for v, n in enumerate(again))
        again = _descended(sizes, tables, min(chosen, again, key=lambda c: _sum(tables, c)))
        if not (now := _sum(tables, again)) < value:
            break
        value, chosen = now, again
    return Least(value, chosen, min(bound, value))


def elimination(
    sizes: Sequence[int], tables: Sequence[Table], most: int = MOST, order: Order | None = None
) -> Elimination:
    """How variables leave tables of such variables, whatever the costs: in parts where a table would be too large."""
    order = order or order_of(sizes, tables, most)
    if order.widest > most:
        most = min(most, PARTS)
        order = order_of(sizes, tables, most)
    left = _Left(sizes, tables, most)
    return Elimination(tuple(left.without(v) for v in order.variables), most)


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

    All that are alike, and would make a table of that size, leave with it, one after the other: what is left of
    repeated layers stays alike, and is worked out once. One that leaves in parts is taken to bring nothing together.
    """
    near = _near(sizes, tables)

    def width(v: int) -> int:
        return prod([sizes[u] for u in near[v]]) * sizes[v]

    kind = _kinds(sizes, tables)
    alike: dict[int, list[int]] = {}
    for v in near:
        alike.setdefault(kind[v], []).append(v)
    heap = [(width(v), kind[v], v) for v in near]
    heapify(heap)
    order, widest = list[int](), 0
    while heap:
        now, _, first = heappop(heap)
        if first not in near or width(first) != now:  # one that changed is there with its new width as well
            continue
        widest = max(widest, now)
        for v in [v for v in alike[kind[first]] if v in near]:
            if width(v) != now:
                continue
            order.append(v)
            around = near.pop(v)
            for u in around:
                near[u] |= around if now <= most else set()
                near[u] -= {u, v}
            for u in around:
                heappush(heap, (width(u), kind[u], u))
    return Order(tuple(order), widest)


def _near(sizes: Sequence[int], tables: Sequence[Table]) -> dict[int, set[int]]:
    """The variables that share a table with each."""
    near: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    for table in tables:
        for v in table.variables:
            near[v].update(u for u in table.variables if u != v)
    return near


def _kinds(sizes: Sequence[int], tables: Sequence[Table]) -> list[int]:
    """The kind of each variable, in order of appearance: those in the same places of the same costs are of one kind."""
    own: list[list[tuple[int, int]]] = [[] for _ in sizes]
    for table in tables:
        for place, v in enumerate(table.variables):
            own[v].append((id(table.costs), place))
    kinds: dict[tuple[tuple[int, int], ...], int] = {}
    return [kinds.setdefault(tuple(sorted(rows)), len(kinds)) for rows in own]


@dataclass(frozen=True, slots=True)
class _Part:
    """Some tables of a variable, by number, and what they depend on beside it.

    `places` are those of each table's variables in (the variable, *around), which have the sizes `shape`; parts that
    are the same in all this are of one `kind`.
    """

    around: tuple[int, ...]
    tables: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    kind: int

    def added(self, costs: Sequence[Costs]) -> Costs:
        """The sum of the tables, the variable's dimension first."""
        total = np.zeros(self.shape)
        for own, places in zip(costs, self.places, strict=True):
            total += _spread(own, places, len(self.shape))
        return total


@dataclass(frozen=True, slots=True)
class _Step:
    """A variable leaves: in one part, or in several, whose best values may differ; then all its tables are asked."""

    v: int
    parts: tuple[_Part, ...]
    tables: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def value(self, found: Mapping[int, int], best: Sequence[Any], costs: Sequence[Costs]) -> int:
        """The best value where those of the variables around are known, from the `best` ones of each part."""
        if len(self.parts) == 1:
            return int(best[0][tuple([found[u] for u in self.parts[0].around])])
        rows = (costs[n][tuple(slice(None) if u == self.v else found[u] for u in of)] for n, of in self.tables)
        return int(np.argmin(sum(rows)))


@dataclass(frozen=True)
class Elimination:
    """The steps in which variables leave tables that depend on the same ones, with no table of more than `most`."""

    steps: tuple[_Step, ...]
    most: int

    @cached_property
    def parted(self) -> set[int]:
        """The variables that leave in parts: without any, what is found is the least."""
        return {step.v for step in self.steps if len(step.parts) > 1}

    def carried_out(self, tables: Sequence[Table]) -> tuple[float, tuple[int, ...]]:
        """What no choice goes below, and a choice that takes this where no variable leaves in parts.

        What hangs together in the same way over the same tables has the same answer, the same object: layers that are
        repeated are worked out once.
        """
        costs, total = [table.costs for table in tables], 0.0
        seen: dict[tuple[int, ...], tuple[Any, Costs]] = {}
        best: list[list[Any]] = []
        for step in self.steps:
            best.append([])
            for part in step.parts:
                own = [costs[n] for n in part.tables]
                key = (part.kind, *map(id, own))
                if key not in seen:
                    added = part.added(own)
                    seen[key] = np.argmin(added, axis=0), np.min(added, axis=0)
                chosen, left = seen[key]
                best[-1].append(chosen)
                if part.around:
                    costs.append(left)
                else:
                    total += float(left)
        found: dict[int, int] = {}
        for step, chosen in zip(reversed(self.steps), reversed(best), strict=True):
            found[step.v] = step.value(found, chosen, costs)
        return total, tuple(found[v] for v in range(len(found)))


class _Left:
    """The variables of the tables that are left, and which tables a variable is in."""

    def __init__(self, sizes: Sequence[int], tables: Sequence[Table], most: int) -> None:
        self.sizes, self.most = sizes, most
        self.variables = [table.variables for table in tables]
        self.of: list[set[int]] = [set() for _ in sizes]
        for n, variables in enumerate(self.variables):
            for v in variables:
                self.of[v].add(n)
        self._kinds: dict[Any, int] = {}

    def without(self, v: int) -> _Step:
        """The variable's leaving, of all its tables at once where they are small enough together; tables for those."""
        own = sorted(self.of[v])
        around = self._around(v, own)
        if self._width(v, around) <= self.most:
            parts = (self._part(v, own, around),)
        else:
            parts = tuple(self._part(v, group, self._around(v, group)) for group in self._groups(v))
        step = _Step(v, parts, tuple((n, self.variables[n]) for n in own) if len(parts) > 1 else ())
        for u in around:
            self.of[u].difference_update(own)
        for part in parts:
            if part.around:
                for u in part.around:
                    self.of[u].add(len(self.variables))
                self.variables.append(part.around)
        return step

    def _groups(self, v: int) -> list[list[int]]:
        """The tables of v in groups that are small enough, the largest first."""
        groups: list[list[int]] = []
        for n in sorted(self.of[v], key=lambda n: (-prod(self.sizes[u] for u in self.variables[n]), n)):
            fitting = (g for g in groups if self._width(v, self._around(v, [*g, n])) <= self.most)
            group = next(fitting, None)
            if group is None:
                groups.append([n])
            else:
                group.append(n)
        return groups

    def _width(self, v: int, around: Iterable[int]) -> int:
        return prod([self.sizes[u] for u in around]) * self.sizes[v]

    def _part(self, v: int, group: Sequence[int], around: set[int]) -> _Part:
        order = (v, *sorted(around))
        place = {u: n for n, u in enumerate(order)}
        places = tuple([tuple([place[u] for u in self.variables[n]]) for n in group])
        shape = tuple([self.sizes[u] for u in order])
        kind = self._kinds.setdefault((places, shape), len(self._kinds))
        return _Part(order[1:], tuple(group), places, shape, kind)

    def _around(self, v: int, group: Iterable[int]) -> set[int]:
        return {u for n in group for u in self.variables[n]} - {v}


def aligned(table: Table, order: tuple[int, ...]) -> Costs:
    """The table with a dimension for each variable of `order`, of size one where it depends on none."""
    return _spread(table.costs, tuple(order.index(v) for v in table.variables), len(order))


def _spread(costs: Costs, places: tuple[int, ...], dims: int) -> Costs:
    """The costs with so many dimensions: their own at `places`, and all others of size one."""
    moved = np.transpose(costs, np.argsort(places))
    shape = [1] * dims
    for at, size in zip(sorted(places), moved.shape, strict=True):
        shape[at] = size
    return moved.reshape(shape)
