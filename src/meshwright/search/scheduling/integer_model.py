"""Scheduling problem in whole numbers, for a solver that has no others.

No constraint is stricter than in the problem: times, amounts and limits are rounded down. Limits may be rounded down
because sums of whole numbers below a limit are below its whole part. So what is proved for the whole numbers holds for
the problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import chain, product
from math import ceil, floor, gcd, inf, lcm
from typing import NamedTuple

from meshwright.pipeline import Action, ActionKind, Schedule, simulate_schedule

from .bounds import Paths
from .problem import Problem

MOST = 2**20
"""Largest number of exact units in the whole; with more of them, the unit is this part of the whole."""
MOST_CHOICES = 2**19
"""Largest number of constraints on pairs of chunks; above it, only the limit of their sum is used."""
DIGITS = 12
NOTHING = 1e-5
"""Tolerance for sums of floats, in units."""


class Unit(NamedTuple):
    """Size of one in whole numbers; `exact` if all numbers are multiples of it."""

    size: float
    exact: bool

    def down(self, amount: float) -> int:
        return floor(amount / self.size + (NOTHING if self.exact else 0.0))

    def up(self, amount: float) -> int:
        return ceil(amount / self.size - (NOTHING if self.exact else 0.0))


def unit(amounts: Iterable[float], whole: float) -> Unit:
    """Return the largest unit of which all amounts are multiples, or else a small part of the whole.

    >>> unit([0.75, 1.5, 0.0], 12.0)
    Unit(size=0.75, exact=True)
    """
    given = [Fraction(f"{x:.{DIGITS}g}") for x in amounts if x]
    if not given:
        return Unit(whole or 1.0, True)
    size = Fraction(gcd(*(x.numerator for x in given)), lcm(*(x.denominator for x in given)))
    return Unit(float(size), True) if whole <= size * MOST else Unit(whole / MOST, False)


def _least_ended(microbatch: int, held: int, limit: int) -> int:
    """Return the number of earlier microbatches that must have ended on a chunk that has all the memory for itself."""
    return max(0, -(-((microbatch + 1) * held - limit) // held)) if held else 0


def _nth_action(kind: ActionKind, chunk: int, n: int, most: int) -> tuple[Action, ...]:
    """Return the action of the n-th microbatch on a chunk; nothing if `n` is above `most`."""
    return (Action(kind, n - 1, chunk),) if n <= most else ()


class IntegerModel:
    """Operations in the order F, B, W, by chunk and by microbatch; `start` is a schedule.

    Microbatches are alike: those of any schedule can be numbered so that every chunk runs all of them in order.
    """

    def __init__(self, problem: Problem, start: Schedule) -> None:
        self.problem, self.start = problem, start
        self.back = ActionKind.BACKWARD_INPUT if problem.split else ActionKind.BACKWARD
        self.kinds = (ActionKind.FORWARD, self.back, *([ActionKind.BACKWARD_WEIGHT] if problem.split else []))
        chunks, microbatches = range(len(problem.way)), range(problem.microbatches)
        self.actions = [Action(kind, m, c) for c, m, kind in product(chunks, microbatches, self.kinds)]
        self.number = {action: n for n, action in enumerate(self.actions)}
        hops = [problem.times.message(c, c + 1) for c in chunks[:-1]]
        seconds = {*map(self._seconds, self.actions), problem.times.overhead, *hops}
        self.tick = unit(seconds, problem.value(start))
        held = {*map(problem.held, chunks), *map(problem.kept, chunks)}
        self.grain = unit(held, max((limit for limit in problem.microbatch_limits if limit != inf), default=1.0))

    def _seconds(self, action: Action) -> float:
        """Return the seconds of an action; W costs no `overhead`, because B and W can be one action."""
        times = self.problem.times
        return times.of(action) + (0.0 if action.kind is ActionKind.BACKWARD_WEIGHT else times.overhead)

    def lengths(self) -> list[int]:
        return [self.tick.down(self._seconds(a)) for a in self.actions]

    def before(self) -> Iterator[tuple[int, int, int]]:
        """Yield (a, b, lag): a must end at least `lag` before b begins."""
        for b in self.actions:
            for a in self._direct_needs(b):
                there, here = self.problem.way[a.chunk], self.problem.way[b.chunk]
                lag = self.tick.down(self.problem.times.message(a.chunk, b.chunk)) if there != here else 0
                yield self.number[a], self.number[b], lag

    def _direct_needs(self, action: Action) -> Iterator[Action]:
        kind, m, c = action.kind, action.microbatch, action.chunk
        if m:
            yield action._replace(microbatch=m - 1)
        if kind is ActionKind.FORWARD:
            if c:
                yield Action(kind, m, c - 1)
        elif kind is ActionKind.BACKWARD_WEIGHT:
            yield Action(self.back, m, c)
        else:
            yield Action(ActionKind.FORWARD, m, c)
            if c + 1 < len(self.problem.way):
                yield Action(kind, m, c + 1)

    def limits(self) -> dict[int, int]:
        """Return the amount that a rank may hold, for ranks with a limit."""
        return {
            rank: self.grain.down(limit) for rank, limit in enumerate(self.problem.microbatch_limits) if limit != inf
        }

    def held(self) -> dict[int, list[tuple[int, int, int]]]:
        """Return the amounts held on each rank, as (first action, last action, amount), from start to end."""
        rows: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in self.limits()}
        for a in self.actions:
            rank = self.problem.way[a.chunk]
            if a.kind is ActionKind.FORWARD and rank in rows:
                rows[rank] += [row for row in self._held_intervals(a) if row[2] > 0]
        return rows

    def _held_intervals(self, forward: Action) -> Iterator[tuple[int, int, int]]:
        held, kept = self._amounts(forward.chunk)
        f, b = self.number[forward], self.number[forward._replace(kind=self.back)]
        yield f, b, held - min(held, kept)
        if self.problem.split:
            w = self.number[forward._replace(kind=ActionKind.BACKWARD_WEIGHT)]
            yield f, w, min(held, kept)
            yield b, w, kept - held

    def _amounts(self, chunk: int) -> tuple[int, int]:
        return self.grain.down(self.problem.held(chunk)), self.grain.down(self.problem.kept(chunk))

    def memory_constraints(self) -> Iterator[list[tuple[int, int]]]:
        """Yield the constraints of memory as lists of pairs (a, b).

        In at least one pair of each list, a must end before b begins.
        """
        for rank, limit in self.limits().items():
            own = self.problem.chunks_of(rank)
            few = len(self.actions) * self._most_at_once(own, limit) ** 2 <= MOST_CHOICES
            for c, m in product(own, range(self.problem.microbatches)):
                forward = Action(ActionKind.FORWARD, m, c)
                pairs = (self._two_chunk_constraints(forward, d, limit) for d in own if d != c and few)
                for choice in chain(self._one_chunk_constraints(forward, limit), *pairs):
                    yield [(self.number[a], self.number[b]) for a, b in choice]

    def _most_at_once(self, own: list[int], limit: int) -> int:
        """Return the largest number of microbatches that a chunk of one rank can hold."""
        return max(min(self.problem.microbatches, limit // max(1, self._amounts(c)[0])) for c in own)

    def _one_chunk_constraints(self, forward: Action, limit: int) -> Iterator[list[tuple[Action, Action]]]:
        """Yield the constraints of a chunk's own memory on a forward.

        If exactly so many backwards have ended, so many weight gradients must have ended that the rest fits.
        """
        _, m, c = forward[:3]
        held, kept = self._amounts(c)
        kept = min(kept, held)
        for ended in range(max(0, _least_ended(m, held, limit) - 1), m + 1):
            short = (m + 1) * held - ended * (held - kept) - limit
            if short <= 0:
                return
            weights = -(-short // kept) if kept else ended + 1
            gradients = _nth_action(self.back, c, ended + 1, m)
            frees = (*gradients, *_nth_action(ActionKind.BACKWARD_WEIGHT, c, weights, ended))
            yield [(a, forward) for a in frees]

    def _two_chunk_constraints(self, forward: Action, other: int, limit: int) -> Iterator[list[tuple[Action, Action]]]:
        """Yield the constraints of the memory of two chunks together, on a forward of one of them.

        There is one for each number of forwards that the other chunk has begun before.
        """
        _, m, c = forward[:3]
        (held, kept), (held_other, kept_other) = self._amounts(c), self._amounts(other)
        if not (held and held_other and kept in (0, held) and kept_other in (0, held_other)):
            return  # a microbatch frees its memory at two times
        last, last_other = (self.kinds[-1] if k else self.back for k in (kept, kept_other))
        most = min(self.problem.microbatches, m + limit // held_other)
        for begun in range(m + 1, most + 1) if other < c else range(max(1, m + 1 - limit // held), m + 1):
            sure = other < c and begun == m + 1
            unless = [] if sure else [(forward, Action(ActionKind.FORWARD, begun - 1, other))]
            for ended in range(_least_ended(m, held, limit), m + 1):
                short = (m + 1 - ended) * held + begun * held_other - limit
                if short <= 0:
                    break
                needed = -(-short // held_other)
                others = _nth_action(last_other, other, needed, min(begun, m))
                frees = (*_nth_action(last, c, ended + 1, m), *others)
                yield unless + [(a, forward) for a in frees]

    def windows(self) -> Iterator[tuple[int | None, int]]:
        """Yield pairs of actions for the objective: the last one of each rank and, for the span, its first one."""
        last = Action(self.kinds[-1], self.problem.microbatches - 1)
        for c, rank in enumerate(self.problem.way):
            first = self.number[Action(ActionKind.FORWARD, 0, self.problem.way.index(rank))]
            yield first if self.problem.objective == "span" else None, self.number[last._replace(chunk=c)]

    def fixed(self) -> Iterator[tuple[int, int]]:
        """Yield actions with the same start in all schedules: forwards before which their rank has no other work."""
        way, head = self.problem.way, Paths(self.problem).head
        for c, rank in enumerate(way):
            if rank in way[:c]:
                return
            yield self.number[Action(ActionKind.FORWARD, 0, c)], self.tick.down(head[c])

    def hint(self) -> list[int]:
        """Return the start of each action in the schedule to start from."""
        at: dict[Action, float] = {}
        for action, begin, _ in (
            timed for row in simulate_schedule(self.start, self.problem.times).rows for timed in row
        ):
            at[action] = begin
            if self.problem.split and action.kind is ActionKind.BACKWARD:
                backward = action._replace(kind=ActionKind.BACKWARD_INPUT)
                at[backward] = begin
                at[backward._replace(kind=ActionKind.BACKWARD_WEIGHT)] = begin + self._seconds(backward)
        return [self.tick.down(at[a]) for a in self.actions]

    def most(self) -> int:
        """Return an upper bound on the value of the best schedules."""
        return self.tick.down(self.problem.value(self.start)) + 1

    def horizon(self) -> int:
        """Return a time by which the best schedules have ended.

        For the span, every rank begins before the first one ends, and ends within its own span.
        """
        return self.most() * (1 if self.problem.objective == "makespan" else 2)

    def schedule(self, starts: list[int], name: str) -> Schedule:
        """Return the schedule with its rows in the order of the starts.

        Among actions that take no time, those that others need come first.
        """
        lengths = self.lengths()
        order = sorted(range(len(starts)), key=lambda n: (starts[n], lengths[n] > 0, self._depth(n)))
        rows: list[list[Action]] = [[] for _ in range(self.problem.ranks)]
        for n in order:
            rows[self.problem.way[self.actions[n].chunk]].append(self.actions[n])
        return Schedule(name, (self.problem.way,), self.problem.microbatches, tuple(map(tuple, rows)))

    def _depth(self, n: int) -> tuple[int, int, int]:
        """Return a key that increases along every dependency between actions."""
        kind, m, c = self.actions[n][:3]
        return m, self.kinds.index(kind), -c if kind is self.back else c
