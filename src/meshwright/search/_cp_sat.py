"""A scheduling problem for CP-SAT, which runs in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.pipeline import Action, Kind, Schedule, simulate

from ._errors import SearchError
from ._problem import Problem

WORKER = Path(__file__).with_name("_cp_sat_worker.py")
RESOLUTION = 20_000
"""Times become whole numbers, of which the horizon has about so many."""


@dataclass(frozen=True, slots=True)
class Solved:
    """What the solver found: a schedule, if it found a better one, and a bound that it proved."""

    schedule: Schedule | None
    bound: float
    proved: bool


def is_installed() -> bool:
    """Whether OR-tools can be used."""
    return find_spec("ortools") is not None


class _Model:
    """Operations in the order F, B, W of chunk after chunk and microbatch after microbatch."""

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
        self.unit = self._unit()

    def _unit(self) -> float:
        """Seconds of one tick: 1 where all times are whole numbers."""
        times = self.problem.times
        given = {times.of(a) + times.overhead for a in self.actions}
        given |= {times.message(c, c + 1) for c in range(len(self.problem.way) - 1)}
        if all(float(t).is_integer() for t in given):
            return 1.0
        return self.problem.value(self.start) / RESOLUTION

    def ticks(self, seconds: float) -> int:
        """Seconds as ticks, rounded up, so that what is feasible in ticks is in seconds."""
        return -int(-(seconds / self.unit + 1e-9) // 1) if self.unit != 1.0 else round(seconds)

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
        limits = [int(limit / _GRAIN + 1e-6) if limit != float("inf") else 0 for limit in p.limits]
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
                    own.append([self.number[a], self.number[Action(until, m, c)], round(amount / _GRAIN)])
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
        slack = 1.0 if self.problem.objective == "makespan" else 1.15
        return starts, self.ticks(unit_times.makespan * slack) + (0 if self.unit == 1.0 else len(self.actions))

    def schedule(self, starts: list[int], name: str) -> Schedule:
        """The rows in the order of their starts."""
        rows: list[list[tuple[int, int]]] = [[] for _ in range(self.problem.ranks)]
        for n, action in enumerate(self.actions):
            rows[self.problem.way[action.chunk]].append((starts[n], n))
        table = tuple(tuple(self.actions[n] for _, n in sorted(row)) for row in rows)
        return Schedule(name, (self.problem.way,), self.problem.microbatches, table)


_GRAIN = 1 / 64
"""Memory is counted in parts of the unit of the problem's memory, so small."""


def solve(problem: Problem, start: Schedule, bound: float, seconds: float, workers: int = 2) -> Solved:
    """The best schedule that CP-SAT finds from `start` in `seconds`. Raises SearchError without OR-tools."""
    if not is_installed():
        raise SearchError(
            "a schedule from a solver", "OR-tools is not installed", "the search for the best table needs it",
            "pip install meshwright[solver]",
        )  # fmt: skip
    model = _Model(problem, start)
    answer = _asked(model, bound, seconds, workers)
    proved = max(
        bound, answer["bound"] * model.unit * (1 if model.unit == 1.0 else 1 - len(model.actions) / RESOLUTION)
    )
    if answer["starts"] is None:
        return Solved(None, proved if answer["status"] == "OPTIMAL" else bound, False)
    return Solved(model.schedule(answer["starts"], "found"), proved, answer["status"] == "OPTIMAL")


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
        "bound": int(bound / model.unit),
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
