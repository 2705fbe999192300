"""Process of the solver: reads a scheduling problem from stdin and writes the best starts and a bound, both as JSON.

It is a process of its own because OR-tools and HiGHS cannot be loaded into one process. It imports nothing else.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from math import ceil, isfinite
from typing import Any

NOTHING = 1e-6


def solve(problem: dict[str, Any]) -> dict[str, Any]:
    """Return the best starts that the solver finds, and a bound.

    `operations` are [rank, length]. `before` are [a, b, lag]: b starts at least `lag` after the end of a. `fixed` are
    [a, start]. `memory_constraints` are lists of pairs [a, b]: in at least one pair of each list, a ends before b
    begins. `held` are lists of [from, to, amount] for each rank: the amount is held from the start of one operation to
    the end of the other.
    """
    cp_model = import_module("ortools.sat.python.cp_model")
    model = _Model(cp_model.CpModel(), problem)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.1, problem["until"] - time.time())
    solver.parameters.num_workers = problem["workers"]
    solver.parameters.random_seed = 0
    status = solver.solve(model.cp)
    name = solver.status_name(status)
    if name not in ("OPTIMAL", "FEASIBLE", "UNKNOWN"):
        raise ValueError(f"solver status {name}, but a schedule exists")
    starts = None if name == "UNKNOWN" else [solver.value(s) for s in model.starts]
    known, proved = problem["cost"][0], solver.best_objective_bound
    return {"starts": starts, "bound": max(known, ceil(proved - NOTHING)) if isfinite(proved) else known}


class _Model:
    """The problem as a model of CP-SAT."""

    def __init__(self, cp: Any, problem: dict[str, Any]) -> None:
        self.cp, self.problem = cp, problem
        self.horizon: int = problem["horizon"]
        self.lengths: list[int] = [length for _, length in problem["operations"]]
        self.starts = [cp.new_int_var(0, self.horizon - length, "") for length in self.lengths]
        self.ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        self.literals: dict[tuple[int, int], Any] = {}
        self._order()
        self._room()
        for rank, held in problem["held"].items():
            self._hold(held, problem["limits"][rank])
        self._minimise()
        for variable, hint in zip(self.starts, problem["hint"], strict=True):
            cp.add_hint(variable, hint)

    def _order(self) -> None:
        ranks: dict[int, list[Any]] = {}
        for (rank, length), start in zip(self.problem["operations"], self.starts, strict=True):
            ranks.setdefault(rank, []).append(self.cp.new_fixed_size_interval_var(start, length, ""))
        for intervals in ranks.values():
            self.cp.add_no_overlap(intervals)
        for a, b, lag in self.problem["before"]:
            self.cp.add(self.starts[b] >= self.ends[a] + lag)
        for a, start in self.problem["fixed"]:
            self.cp.add(self.starts[a] == start)

    def _room(self) -> None:
        for choice in self.problem["memory_constraints"]:
            if len(choice) == 1:
                self.cp.add(self.ends[choice[0][0]] <= self.starts[choice[0][1]])
            else:
                self.cp.add_bool_or([self._first(a, b) for a, b in choice])

    def _first(self, a: int, b: int) -> Any:
        """Return a literal that is true if a ends before b begins; if it is false, b ends before a begins."""
        if (a, b) not in self.literals:
            literal = self.literals[a, b] = self.cp.new_bool_var("")
            self.cp.add(self.ends[a] <= self.starts[b]).only_enforce_if(literal)
            self.cp.add(self.ends[b] <= self.starts[a]).only_enforce_if(~literal)
        return self.literals[a, b]

    def _hold(self, held: list[list[int]], limit: int) -> None:
        """Add the constraint that no more than `limit` is held at any time."""
        intervals: list[Any] = []
        for first, last, _ in held:
            size = self.cp.new_int_var(0, self.horizon, "")
            self.cp.add(self.starts[first] + size == self.ends[last])
            intervals.append(self.cp.new_interval_var(self.starts[first], size, self.ends[last], ""))
        self.cp.add_cumulative(intervals, [amount for _, _, amount in held], limit)

    def _minimise(self) -> None:
        cost = self.cp.new_int_var(*self.problem["cost"], "cost")
        for first, last in self.problem["windows"]:
            self.cp.add(cost >= self.ends[last] - (0 if first is None else self.starts[first]))
        self.cp.minimize(cost)


if __name__ == "__main__":
    json.dump(solve(json.load(sys.stdin)), sys.stdout)
