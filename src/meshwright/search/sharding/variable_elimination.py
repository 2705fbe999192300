"""Exact minimum of a sum of tables that share variables, by variable elimination.

Each table has one dimension per variable that it depends on. To eliminate a variable, all tables that contain it are
added, and the minimum along its dimension is a new table over the variables around it. The variable with the smallest
new table is eliminated first. A chain costs as much as its links, and the cost of a graph depends on its width.
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
"""Largest number of entries of a table in an exact elimination."""
PARTS = 2**14
"""Largest number of entries of a table if variables have to be eliminated in parts."""
DIMS = 64
"""Largest number of dimensions of a numpy array."""
ROUNDS = 4
"""Number of rounds in which a choice is improved that is not known to be the best."""


class Table(NamedTuple):
    """Costs, one dimension per variable, in the order of `variables`."""

    variables: tuple[int, ...]
    costs: Costs


class Order(NamedTuple):
    """The order in which variables are eliminated, and the number of entries of the largest table."""

    variables: tuple[int, ...]
    widest: int


class Least(NamedTuple):
    """A sum, its choice, and a lower bound, which equals the sum if the choice is proved to be the best."""

    value: float
    chosen: tuple[int, ...]
    bound: float


def least(
    sizes: Sequence[int],
    tables: Sequence[Table],
    steps: Elimination | None = None,
    most: int = MOST,
    costs: Sequence[Costs] | None = None,
) -> Least:
    """Return the least sum over all choices of one of `sizes[v]` values for each variable v, and the choice.

    `steps` are the steps of the elimination, if they are known (`elimination`). `costs` replace those of the tables,
    one for each. If a table would have more than `most` entries, its variable is eliminated in parts, each with its
    own best value (mini-buckets, Dechter and Rish 2003). This gives a lower bound and a choice, which is then improved
    for up to `ROUNDS` rounds.

    >>> pair = Table((0, 1), np.array([[3.0, 1.0], [0.0, 5.0]]))
    >>> least((2, 2), [pair, Table((1,), np.array([2.0, 0.0]))]).chosen
    (0, 1)
    """
    steps = steps or elimination(sizes, tables, most)
    bound, chosen = steps.carried_out(costs or [table.costs for table in tables])
    if not steps.parted:
        return Least(bound, chosen, bound)
    if costs is not None:
        tables = [Table(variables, own) for (variables, _), own in zip(tables, costs, strict=True)]
    value, chosen = _improved_in_rounds(sizes, tables, steps, chosen)
    return Least(value, chosen, min(bound, value))


def _improved_in_rounds(
    sizes: Sequence[int], tables: Sequence[Table], steps: Elimination, chosen: tuple[int, ...]
) -> tuple[float, tuple[int, ...]]:
    """Return the least sum that was found, and its choice.

    In each round, the variables that are eliminated in parts keep their values, and the others are eliminated.
    """
    value, parted, most = total_cost(tables, chosen), steps.parted, steps.most
    for _ in range(ROUNDS):
        fixed = [_with_fixed_values(table, {v: chosen[v] for v in parted}) for table in tables]
        left = [1 if v in parted else n for v, n in enumerate(sizes)]
        _, again = elimination(left, fixed, most).carried_out([table.costs for table in fixed])
        again = tuple(chosen[v] if v in parted else n for v, n in enumerate(again))
        again = _improved_by_descent(sizes, tables, min(chosen, again, key=lambda c: total_cost(tables, c)))
        if not (now := total_cost(tables, again)) < value:
            break
        value, chosen = now, again
    return value, chosen


def elimination(
    sizes: Sequence[int], tables: Sequence[Table], most: int = MOST, order: Order | None = None
) -> Elimination:
    """Return the steps that eliminate the variables of such tables, for any costs; in parts if a table is too large."""
    order = order or order_of(sizes, tables, most)
    if order.widest > most:
        most = min(most, PARTS)
        order = order_of(sizes, tables, most)
    left = _RemainingTables(sizes, tables, most)
    return Elimination(tuple(left.without(v) for v in order.variables), most)


def total_cost(tables: Sequence[Table], chosen: Sequence[int]) -> float:
    """Return the sum of the tables at the chosen values of all variables."""
    return sum(float(table.costs[tuple(chosen[v] for v in table.variables)]) for table in tables)


def _with_fixed_values(table: Table, values: Mapping[int, int]) -> Table:
    """Return the table with a single entry for each variable whose value is given."""
    if values.keys().isdisjoint(table.variables):
        return table
    kept = tuple(slice(values[v], values[v] + 1) if v in values else slice(None) for v in table.variables)
    return Table(table.variables, table.costs[kept])


def _improved_by_descent(sizes: Sequence[int], tables: Sequence[Table], chosen: Sequence[int]) -> tuple[int, ...]:
    """Return the choice after coordinate descent.

    Each variable takes its best value beside the others, until none changes.
    """
    of: list[list[Table]] = [[] for _ in sizes]
    for table in tables:
        for v in table.variables:
            of[v].append(table)
    now = dict(enumerate(chosen))
    waiting = {*now}
    while waiting:
        v = waiting.pop()
        if not of[v]:
            continue
        costs = _costs_along(v, of[v], now)
        best = int(np.argmin(costs))
        if costs[best] < costs[now[v]]:
            now[v] = best
            waiting |= {u for t in of[v] for u in t.variables} - {v}
    return tuple(now.values())


def _costs_along(v: int, tables: Iterable[Table], chosen: Mapping[int, int]) -> Costs:
    """Return the sum of a variable's tables for each of its values, beside the chosen values of all other variables."""
    rows = (t.costs[tuple(slice(None) if u == v else chosen[u] for u in t.variables)] for t in tables)
    return sum(rows, start=np.zeros(()))


def order_of(sizes: Sequence[int], tables: Sequence[Table], most: int = MOST) -> Order:
    """Return the order of elimination: each time, the variable whose elimination makes the smallest table.

    All variables of its kind that would make a table of that size are eliminated after it, one by one. The rest of
    repeated layers then stays alike, and is computed once. A variable that is eliminated in parts is assumed to connect
    no others.
    """
    near = _neighbours(sizes, tables)

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
        if first not in near or width(first) != now:  # an outdated entry: the new width has an entry too
            continue
        widest = max(widest, now)
        for v in [v for v in alike[kind[first]] if v in near]:
            if width(v) != now:
                continue
            order.append(v)
            for u in _remove_variable(near, v, connects=now <= most):
                heappush(heap, (width(u), kind[u], u))
    return Order(tuple(order), widest)


def _remove_variable(near: dict[int, set[int]], v: int, connects: bool) -> set[int]:
    """Remove a variable and return its neighbours, which become each other's neighbours if it `connects` them."""
    around = near.pop(v)
    for u in around:
        near[u] |= around if connects else set()
        near[u] -= {u, v}
    return around


def _neighbours(sizes: Sequence[int], tables: Sequence[Table]) -> dict[int, set[int]]:
    """Return the variables that share a table with each variable."""
    near: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    for table in tables:
        for v in table.variables:
            near[v].update(u for u in table.variables if u != v)
    return near


def _kinds(sizes: Sequence[int], tables: Sequence[Table]) -> list[int]:
    """Return the kind of each variable, numbered in order of appearance.

    Variables in the same places of the same costs are of one kind.
    """
    own: list[list[int]] = [[] for _ in sizes]
    for variables, costs in tables:
        for place, v in enumerate(variables):
            own[v].append(id(costs) * DIMS + place)
    kinds: dict[tuple[int, ...], int] = {}
    return [kinds.setdefault(tuple(sorted(rows)), len(kinds)) for rows in own]


@dataclass(frozen=True, slots=True)
class _Part:
    """Some tables of a variable, by index, and the other variables that they depend on (`around`).

    `places` are the positions of each table's variables in (the variable, *around), and `shape` are their sizes. Parts
    with the same places and shape are of one `kind`.
    """

    around: tuple[int, ...]
    tables: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    kind: int

    def added(self, costs: Sequence[Costs]) -> Costs:
        """Return the sum of the tables, with the variable's dimension first."""
        total = np.zeros(self.shape)
        for own, places in zip(costs, self.places, strict=True):
            total += _with_dims(own, places, len(self.shape))
        return total


@dataclass(frozen=True, slots=True)
class _Step:
    """The elimination of a variable in one part, or in several parts whose best values may differ.

    For several parts, `tables` are all tables of the variable, from which its value is chosen.
    """

    v: int
    parts: tuple[_Part, ...]
    tables: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def value(self, found: Mapping[int, int], best: Any, costs: Sequence[Costs]) -> int:
        """Return the best value of the variable, given the values of the variables around it.

        `best` are the best values of its last part, which are read if it is the only one.
        """
        if len(self.parts) == 1:
            return int(best[tuple([found[u] for u in self.parts[0].around])])
        tables = [Table(variables, costs[n]) for n, variables in self.tables]
        return int(np.argmin(_costs_along(self.v, tables, found)))


@dataclass(frozen=True)
class Elimination:
    """Steps that eliminate the variables of tables with any costs; no table has more than `most` entries."""

    steps: tuple[_Step, ...]
    most: int

    @cached_property
    def parted(self) -> set[int]:
        """Variables that are eliminated in parts; if there are none, the result is the minimum."""
        return {step.v for step in self.steps if len(step.parts) > 1}

    def carried_out(self, given: Sequence[Costs]) -> tuple[float, tuple[int, ...]]:
        """Return a lower bound, and a choice that attains it if no variable is eliminated in parts.

        `given` are the costs of the tables.

        Parts of one kind over the same tables have the same result, as the same object. Repeated layers are therefore
        computed once.
        """
        costs, total = [*given], 0.0
        seen: dict[tuple[int, ...], tuple[Any, Costs]] = {}
        best: list[Any] = []
        for step in self.steps:
            chosen = None
            for part in step.parts:
                own = [costs[n] for n in part.tables]
                key = (part.kind, *map(id, own))
                if key not in seen:
                    seen[key] = _least_along_first(part.added(own))
                chosen, left = seen[key]
                if part.around:
                    costs.append(left)
                else:
                    total += float(left)
            best.append(chosen)
        found: dict[int, int] = {}
        for step, chosen in zip(reversed(self.steps), reversed(best), strict=True):
            found[step.v] = step.value(found, chosen, costs)
        return total, tuple(found[v] for v in range(len(found)))


def _least_along_first(costs: Costs) -> tuple[NDArray[np.int32], Costs]:
    """Return the index of the first least entry along the first dimension, and the entry.

    A loop over this short dimension is several times as fast as `numpy.argmin` along it.
    """
    chosen, least = np.zeros(costs.shape[1:], np.int32), costs[0]
    for n in range(1, len(costs)):
        np.copyto(chosen, n, where=costs[n] < least)
        least = np.minimum(least, costs[n])
    return chosen, least


class _RemainingTables:
    """The variables of the tables that are left, and the tables of each variable."""

    def __init__(self, sizes: Sequence[int], tables: Sequence[Table], most: int) -> None:
        self.sizes, self.most = sizes, most
        self.variables = [table.variables for table in tables]
        self.of: list[set[int]] = [set() for _ in sizes]
        for n, variables in enumerate(self.variables):
            for v in variables:
                self.of[v].add(n)
        self._kinds: dict[Any, tuple[tuple[tuple[int, ...], ...], tuple[int, ...], int]] = {}

    def without(self, v: int) -> _Step:
        """Return the step that eliminates a variable, and replace its tables by the new ones.

        The step has one part if the variable's tables are small enough together, and several parts otherwise.
        """
        own = sorted(self.of[v])
        around = self._variables_around(v, own)
        if self._width(v, around) <= self.most:
            parts = (self._part(v, own, around),)
        else:
            parts = tuple(self._part(v, group, self._variables_around(v, group)) for group in self._groups(v))
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
        """Return the tables of v in groups that are small enough, starting with the largest table."""
        groups: list[list[int]] = []
        for n in sorted(self.of[v], key=lambda n: (-prod(self.sizes[u] for u in self.variables[n]), n)):
            fitting = (g for g in groups if self._width(v, self._variables_around(v, [*g, n])) <= self.most)
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
        places = tuple([tuple(map(place.__getitem__, self.variables[n])) for n in group])
        shape = tuple([self.sizes[u] for u in order])
        places, shape, kind = self._kinds.setdefault((places, shape), (places, shape, len(self._kinds)))
        return _Part(order[1:], tuple(group), places, shape, kind)

    def _variables_around(self, v: int, group: Iterable[int]) -> set[int]:
        return set[int]().union(*[self.variables[n] for n in group]) - {v}


def aligned(table: Table, order: tuple[int, ...]) -> Costs:
    """Return the costs with a dimension for each variable of `order`, of size one for those not in the table."""
    return _with_dims(table.costs, tuple(order.index(v) for v in table.variables), len(order))


def _with_dims(costs: Costs, places: tuple[int, ...], dims: int) -> Costs:
    """Return the costs with `dims` dimensions: their own at `places`, and all others of size one."""
    moved = np.transpose(costs, np.argsort(places))
    shape = [1] * dims
    for at, size in zip(sorted(places), moved.shape, strict=True):
        shape[at] = size
    return moved.reshape(shape)
