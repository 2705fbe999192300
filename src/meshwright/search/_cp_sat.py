"""A scheduling problem for CP-SAT, which runs in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil, floor
from pathlib import Path
from typing import Any

from meshwright.pipeline import Action, Kind, Schedule, simulate

from ._errors import SearchError
from ._problem import Problem

WORKER = Path(__file__).with_name("_cp_sat_worker.py")
UNITS = (1.0, 0.5, 0.1, 0.05, 0.01, 0.001)
"""One tick, in the unit of the times, where all of them are multiples of it."""
RESOLUTION = 20_000
"""Times that are no such multiples are rounded down to ticks, of which the start schedule takes so many."""
GRAINS = 2**20
"""Likewise, the largest memory of a rank is so many grains where amounts are no multiples of 1/64."""


@dataclass(frozen=True, slots=True)
class Solved:
    """What the solver found: a schedule, if it found one, and a bound that it proved."""

    schedule: Schedule | None
    bound: float


def is_installed() -> bool:
    """Whether OR-tools can be used."""
    return find_spec("ortools") is not None


class _Model:
    """Operations in the order F, B, W of chunk after chunk and microbatch after microbatch.

    In whole numbers everything is as easy as it is or easier: times and amounts are rounded down, limits up. So what
    is proved for the model holds for the problem.
    """

    def __init__(self, problem: Problem, start: Schedule) -> None:
        self.problem = problem
        self.kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        if not problem.split:
            self.kinds = (Kind.FORWARD, Kind.BACKWARD)
        self.actions = [
            Action(kind, m, c)
            for c in range(len(problem.way))
            for m in range(problem.microbatches)
            for kind in self.kinds
        ]
        self.number = {action: n for n, action in enumerate(self.actions)}
        self.start = start
        self.unit, self.exact = self._unit()
        self.grain = self._grain()

    def _unit(self) -> tuple[float, bool]:
        """Seconds of one tick, and whether all times are multiples of it."""
        times = self.problem.times
        given = {times.of(a) + times.overhead for a in self.actions}
        given |= {times.message(c, c + 1) for c in range(len(self.problem.way) - 1)}
        exact = next((unit for unit in UNITS if _are_multiples(given, unit)), None)
        return (exact, True) if exact else (self.problem.value(self.start) / RESOLUTION, False)

    def _grain(self) -> float:
        """The memory that one whole number stands for."""
        known = [limit for limit in self.problem.limits if limit != float("inf")]
        given = {abs(self.problem.memory.change(self.start, a)) for a in self.actions}
        return 1 / 64 if not known or _are_multiples({*known, *given}, 1 / 64) else (max(known) or 1.0) / GRAINS

    def ticks(self, seconds: float) -> int:
        """Seconds as ticks, rounded down."""
        return floor(seconds / self.unit + (_NOTHING if self.exact else 0.0))

    def cut(self, bound: float) -> int:
        """A proved bound in ticks: the next one where times are exact, less what rounding takes off where not."""
        return ceil(bound / self.unit - _NOTHING) if self.exact else self.ticks(bound) - 2 * len(self.actions)

    def length(self, action: Action) -> int:
        return self.ticks(self.problem.times.of(action) + self.problem.times.overhead)

    def before(self) -> list[list[int]]:
        """What must end before what, and how long before."""
        found: list[list[int]] = []
        way, times, last = self.problem.way, self.problem.times, len(self.problem.way) - 1
        back = self.kinds[1]

        def add(a: Action, b: Action) -> None:
            lag = 0 if way[a.chunk] == way[b.chunk] else self.ticks(times.message(a.chunk, b.chunk))
            found.append([self.number[a], self.number[b], lag])

        for action in self.actions:
            kind, m, c = action.kind, action.microbatch, action.chunk
            if m:
                add(Action(kind, m - 1, c), action)
            if kind is Kind.FORWARD and c:
                add(Action(kind, m, c - 1), action)
            elif kind is back:
                add(Action(kind, m, c + 1) if c < last else Action(Kind.FORWARD, m, c), action)
                add(Action(Kind.FORWARD, m, c), action)
            elif kind is Kind.BACKWARD_WEIGHT:
                add(Action(back, m, c), action)
        return found

    def held(self) -> tuple[dict[str, list[list[int]]], list[int]]:
        """Per rank what is held from which action to which, and the limits, as whole numbers."""
        p, shape = self.problem, self.start
        rows: dict[str, list[list[int]]] = {}
        limits = [ceil(limit / self.grain - _NOTHING) if limit != float("inf") else 0 for limit in p.limits]
        for a in self.actions:
            rank = p.way[a.chunk]
            if a.kind is not Kind.FORWARD or p.limits[rank] == float("inf"):
                continue
            m, c = a.microbatch, a.chunk
            taken = p.memory.change(shape, a)
            freed = -p.memory.change(shape, Action(self.kinds[1], m, c))
            rest = taken - freed if p.split else 0.0
            own = rows.setdefault(str(rank), [])
            for until, amount in ((self.kinds[1], taken - rest), (self.kinds[-1], rest)):
                if amount > 0:
                    grains = floor(amount / self.grain + _NOTHING)
                    own.append([self.number[a], self.number[Action(until, m, c)], grains])
        return rows, limits

    def windows(self) -> list[list[int | None]]:
        """Pairs of actions between which the objective lies: per rank its last ones, and its first for the span."""
        found: list[list[int | None]] = []
        m, last = self.problem.microbatches - 1, self.kinds[-1]
        for rank in range(self.problem.ranks):
            own = [c for c, r in enumerate(self.problem.way) if r == rank]
            first = self.number[Action(Kind.FORWARD, 0, own[0])] if self.problem.objective == "span" else None
            found += [[first, self.number[Action(last, m, c)]] for c in own]
        return found

    def hint(self) -> tuple[list[int], int]:
        """When the schedule to start from begins its actions, in ticks, and its horizon."""
        unit_times = simulate(self.start, self.problem.times)
        at = {atom: timed.start for row in unit_times.rows for timed in row for atom in timed.action.atoms}
        starts = [self.ticks(at[a]) if a in at else 0 for a in self.actions]
        if self.problem.objective == "makespan":
            return starts, self.ticks(unit_times.makespan) + 1
        # Every rank begins before the first one ends, so that nothing ends behind twice the best span.
        return starts, self.ticks(max(unit_times.makespan, 2 * unit_times.span)) + 1

    def schedule(self, starts: list[int], name: str) -> Schedule:
        """The rows in the order of their starts."""
        rows: list[list[tuple[int, int]]] = [[] for _ in range(self.problem.ranks)]
        for n, action in enumerate(self.actions):
            rows[self.problem.way[action.chunk]].append((starts[n], n))
        table = tuple(tuple(self.actions[n] for _, n in sorted(row)) for row in rows)
        return Schedule(name, (self.problem.way,), self.problem.microbatches, table)


_NOTHING = 1e-6
"""What sums of floats may be off by, in ticks or grains."""


def _are_multiples(given: set[float], unit: float) -> bool:
    return all(abs(x / unit - round(x / unit)) < _NOTHING for x in given)


def solve(problem: Problem, start: Schedule, bound: float, seconds: float, workers: int = 2) -> Solved:
    """The best schedule that CP-SAT finds from `start` in `seconds`. Raises SearchError without OR-tools."""
    if not is_installed():
        raise SearchError(
            "a schedule from a solver", "OR-tools is not installed", "the search for the best table needs it",
            "pip install meshwright[solver]",
        )  # fmt: skip
    model = _Model(problem, start)
    answer = _asked(model, bound, seconds, workers)
    if answer["starts"] is None:
        return Solved(None, bound)
    found = model.schedule(answer["starts"], "found")
    return Solved(found if problem.allows(found) else None, max(bound, answer["bound"] * model.unit))


def _asked(model: _Model, bound: float, seconds: float, workers: int) -> Mapping[str, Any]:
    """The worker's answer."""
    held, limits = model.held()
    hint, horizon = model.hint()
    question = {
        "operations": [[model.problem.way[a.chunk], model.length(a)] for a in model.actions],
        "before": model.before(),
        "held": held,
        "limits": limits,
        "windows": model.windows(),
        "hint": hint,
        "horizon": horizon,
        "bound": max(0, model.cut(bound)),
        "seconds": seconds,
        "workers": workers,
    }
    ran = subprocess.run(
        [sys.executable, str(WORKER)], input=json.dumps(question), capture_output=True, text=True, check=False,
        timeout=seconds + 60,
    )  # fmt: skip
    if ran.returncode:
        raise SearchError(
            "a schedule from a solver", ran.stderr.strip().splitlines()[-1] if ran.stderr else "no answer",
            "the solver's process failed", "python -m pip check, or a search without solver",
        )  # fmt: skip
    answer: Mapping[str, Any] = json.loads(ran.stdout)
    return answer
