"""The solver's process: a scheduling problem as JSON on stdin, the best starts and a bound as JSON on stdout.

It runs apart because OR-tools and HiGHS cannot be loaded into one process, and imports nothing else.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any


def solve(problem: dict[str, Any]) -> dict[str, Any]:
    """`operations` are [rank, length]; `before` are [a, b, lag]: b starts no earlier than `lag` behind the end of a.

    `held` are, per rank, [from, to, amount]: so much is held from the start of one to the end of another.
    """
    cp_model: Any = import_module("ortools.sat.python.cp_model")
    model = cp_model.CpModel()
    horizon: int = problem["horizon"]
    lengths = [length for _, length in problem["operations"]]
    starts = [model.new_int_var(0, horizon - length, "") for length in lengths]
    intervals = [model.new_fixed_size_interval_var(s, n, "") for s, n in zip(starts, lengths, strict=True)]
    ranks: dict[int, list[int]] = {}
    for n, (rank, _) in enumerate(problem["operations"]):
        ranks.setdefault(rank, []).append(n)
    for members in ranks.values():
        model.add_no_overlap([intervals[n] for n in members])
    for a, b, lag in problem["before"]:
        model.add(starts[b] >= starts[a] + lengths[a] + lag)
    for rank, held in problem["held"].items():
        _hold(model, starts, lengths, held, problem["limits"][int(rank)], horizon)
    cost = model.new_int_var(problem["bound"], horizon, "cost")
    for first, last in problem["windows"]:
        begin = 0 if first is None else starts[first]
        model.add(cost >= starts[last] + lengths[last] - begin)
    model.minimize(cost)
    for variable, hint in zip(starts, problem["hint"], strict=True):
        model.add_hint(variable, hint)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = problem["seconds"]
    solver.parameters.num_workers = problem["workers"]
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return {"starts": None, "bound": problem["bound"], "status": solver.status_name(status)}
    return {
        "starts": [solver.value(s) for s in starts],
        "value": round(solver.objective_value),
        "bound": round(solver.best_objective_bound),
        "status": solver.status_name(status),
    }


def _hold(model: Any, starts: list[Any], lengths: list[int], held: list[list[int]], limit: int, horizon: int) -> None:
    """No more than `limit` is held at any time."""
    intervals: list[Any] = []
    for first, last, _ in held:
        size = model.new_int_var(0, horizon, "")
        end = starts[last] + lengths[last]
        model.add(starts[first] + size == end)
        intervals.append(model.new_interval_var(starts[first], size, end, ""))
    model.add_cumulative(intervals, [amount for _, _, amount in held], limit)


if __name__ == "__main__":
    json.dump(solve(json.load(sys.stdin)), sys.stdout)
