"""Results and proofs of the solver, compared with all tables of small problems."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from math import inf

import pytest

from meshwright.pipeline import (
    Action,
    ActionKind,
    ChunkMemory,
    Schedule,
    ScheduleError,
    Times,
    check_schedule,
    linear,
    looped,
    zigzag,
)
from meshwright.search import Problem, SearchError, find_schedule, hints, lower_bound
from meshwright.search.scheduling.cp_sat import WORKER, solve
from meshwright.search.scheduling.integer_model import IntegerModel, unit

needs_solver = pytest.mark.skipif(find_spec("ortools") is None, reason="OR-tools is not installed")

UNEQUAL = Times((3.0, 5.0), (4.0, 2.0), (2.0, 3.0), transfer=1.0)
FRACTIONS = Times((0.37, 1.21), (0.93, 0.37), (0.11, 0.74), transfer=0.05)
ODD = Times((1 / 3, 0.7), (2 / 7, 0.45), (0.1, 1 / 9), transfer=1 / 13)
GIB = float(2**30)
BYTES = ChunkMemory((1234567891.0, 987654321.0), (617283945.0, 987654321.0), static=3 * GIB)
LINE, V, LOOP = linear(2)[0], zigzag(2)[0], looped(2, 2)[0]
SMALL = {
    "unequal": Problem(LINE, 3, UNEQUAL),
    "short of memory": Problem(LINE, 3, UNEQUAL, ChunkMemory(1.0, 0.5), 1.5),
    "one microbatch": Problem(LINE, 3, UNEQUAL, ChunkMemory(1.0, 0.5), 1.0, "span"),
    "memory per rank": Problem(LINE, 3, UNEQUAL, ChunkMemory(1.0, 1.0), (2.0, 1.0), "span"),
    "more is kept than held": Problem(LINE, 3, UNEQUAL, ChunkMemory(1.0, 1.5), 2.6),
    "whole backwards": Problem(LINE, 3, UNEQUAL, ChunkMemory(1.0), 2.0, split=False),
    "whole backwards, span": Problem(LINE, 3, UNEQUAL, ChunkMemory(1.0), 1.0, "span", split=False),
    "fractions": Problem(LINE, 3, FRACTIONS, ChunkMemory(1.0, 0.5), 2.0),
    "fractions, span": Problem(LINE, 3, FRACTIONS, ChunkMemory(1.0, 0.5), 1.5, "span"),
    "odd numbers": Problem(LINE, 3, ODD, ChunkMemory(0.3, 0.1), 0.65),
    "odd numbers, span": Problem(LINE, 3, ODD, ChunkMemory(0.3, 0.1), 0.5, "span"),
    "bytes": Problem(LINE, 3, UNEQUAL, BYTES, 3 * GIB + 2 * 1234567891.0),
    "two microbatches": Problem(LINE, 2, UNEQUAL, ChunkMemory(1.0, 0.5), 1.5),
    "overhead": Problem(LINE, 2, replace(UNEQUAL, overhead=0.3), ChunkMemory(1.0, 0.5), 1.5),
    "no time for some": Problem(LINE, 3, Times((2.0, 1.0), (0.0, 1.0), (1.0, 0.0)), ChunkMemory(1.0, 0.5), 1.5),
    "a V": Problem(V, 2, Times(2.0, 3.0, 1.0, transfer=0.5), ChunkMemory(0.5), 1.0),
    "a V, span": Problem(V, 2, Times((2.0, 1.0, 1.0, 4.0), 3.0, 1.0), ChunkMemory(0.5, 0.25), 1.0, "span"),
    "a loop": Problem(LOOP, 2, Times(2.0, (1.0, 2.0, 2.0, 3.0), 1.0), ChunkMemory(0.5), 1.0),
}  # fmt: skip


@needs_solver
@pytest.mark.parametrize("problem", SMALL.values(), ids=SMALL.keys())
def test_the_solver_finds_the_best_of_all_tables(problem: Problem) -> None:
    found = find_schedule(problem, seconds=10)
    best = optimum(problem)
    check_schedule(found.schedule, memory=problem.memory, capacity=problem.limits)
    assert problem.value(found.schedule) == found.value >= best * (1 - 1e-9)
    assert lower_bound(problem) <= best * (1 + 1e-9)
    assert found.bound <= best * (1 + 1e-9)
    if not problem.times.overhead:  # the solver does not count it for W, because it may be part of BW
        assert found.value == pytest.approx(best, rel=1e-9)
        assert found.gap < 1e-4
        assert found.is_proved or problem.times == ODD


@needs_solver
@pytest.mark.parametrize("name", ["short of memory", "odd numbers, span", "a V, span"])
def test_bounds_of_the_solver_are_valid_from_any_start(name: str) -> None:
    """The solver starts with neither a bound nor a good schedule."""
    problem = SMALL[name]
    start = max(hints(problem), key=problem.value)
    solved = solve(problem, start, 0.0, time.time() + 10)
    assert solved.schedule is not None
    assert solved.bound <= optimum(problem) * (1 + 1e-9) <= problem.value(solved.schedule) * (1 + 2e-9)
    assert solved.bound == pytest.approx(optimum(problem), rel=1e-4)


@needs_solver
def test_the_solver_improves_a_known_schedule() -> None:
    problem = Problem(linear(3)[0], 6, Times(10.0, 10.0, 10.0), ChunkMemory(1.0, 0.5), 2.0)
    known = min(map(problem.value, hints(problem)))
    found = find_schedule(problem, seconds=10)
    assert found.value == 250 < known
    assert str(found).startswith("found from ")


@needs_solver
def test_without_time_the_solver_returns_the_known_schedule() -> None:
    problem = Problem(linear(4)[0], 8, Times(297.0, 294.0, 199.0, transfer=5.0), ChunkMemory(1.0, 0.5), 3.0)
    start = next(hints(problem))
    solved = solve(problem, start, lower_bound(problem), time.time())
    assert lower_bound(problem) <= solved.bound <= problem.value(solved.schedule or start)


@needs_solver
def test_the_error_of_a_failed_solver_has_the_reason() -> None:
    ran = subprocess.run([sys.executable, str(WORKER)], input="{}", capture_output=True, text=True, check=False)
    assert ran.returncode
    assert "KeyError" in ran.stderr
    problem = SMALL["unequal"]
    with pytest.raises(SearchError, match=r"INFEASIBLE(.|\n)*process failed"):
        solve(replace(problem, capacity=0.5), next(hints(problem)), 0.0, time.time() + 5)


def test_a_search_without_the_solver_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.search.scheduling.cp_sat.is_installed", lambda: False)
    with pytest.raises(SearchError, match=r"meshwright\[solver\]"):
        solve(SMALL["unequal"], next(hints(SMALL["unequal"])), 0.0, time.time())


@pytest.mark.parametrize("problem", SMALL.values(), ids=SMALL.keys())
def test_rounding_to_integers_keeps_known_schedules_feasible(problem: Problem) -> None:
    """Every known schedule, in integer times, satisfies all constraints of the solver."""
    for start in hints(problem):
        whole = IntegerModel(problem, start)
        begin, length = whole.hint(), whole.lengths()
        end = [a + b for a, b in zip(begin, length, strict=True)]
        assert all(begin[b] >= end[a] + lag for a, b, lag in whole.before())
        assert all(begin[a] == start for a, start in whole.fixed())
        assert all(any(end[a] <= begin[b] for a, b in choice) for choice in whole.memory_constraints())
        assert all(limit >= _most(rows, begin, end) for limit, rows in _memory(whole))
        off = 0 if whole.tick.exact else 1
        spans = [end[last] - (0 if first is None else begin[first]) for first, last in whole.windows()]
        assert max(spans) <= whole.tick.down(problem.value(start)) + off <= whole.most()
        assert max(end) <= whole.horizon()


def test_times_in_one_unit_are_integers() -> None:
    assert unit([0.37, 1.21], 100.0) == (0.01, True)
    assert unit([297.0, 294.0, 0.0], 1e4) == (3.0, True)
    assert unit([0.1 + 0.2, 0.6], 10.0) == (0.3, True)
    assert not unit([1 / 3, 0.7], 10.0).exact
    assert unit([], 0.0).exact


def _memory(whole: IntegerModel) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    yield from ((limit, whole.held()[rank]) for rank, limit in whole.limits().items())


def _most(rows: list[tuple[int, int, int]], begin: list[int], end: list[int]) -> int:
    return max(sum(n for a, b, n in rows if begin[a] <= begin[now] < end[b]) for now, _, _ in rows)


def optimum(problem: Problem) -> float:
    """Return the least value of all tables that the problem permits, by exhaustive search."""
    best = inf
    rows = [list(_rows(problem, rank)) for rank in range(problem.ranks)]
    for table in product(*rows):
        schedule = Schedule("", (problem.way,), problem.microbatches, table)
        try:
            best = min(best, problem.value(schedule))
        except ScheduleError:
            continue  # ranks wait for each other
    return best


def _rows(problem: Problem, rank: int) -> Iterator[tuple[Action, ...]]:
    """Yield every order of a rank's actions that its own memory permits; for few microbatches, also out of order."""
    shape = Schedule("", (problem.way,), problem.microbatches, ((),) * problem.ranks)
    parts = {a: problem.memory.change(shape, a) for n in _merged(problem) for a in _actions(problem, rank, n)}
    for merged in _merged(problem):
        yield from _orders(
            problem, (), frozenset(_actions(problem, rank, merged)), parts, problem.microbatch_limits[rank]
        )


def _merged(problem: Problem) -> Iterator[frozenset[int]]:
    """Yield sets of microbatches whose backwards are whole, which can be shorter only with an overhead."""
    every = range(problem.microbatches)
    if not problem.split:
        yield frozenset(every)
    elif not problem.times.overhead:
        yield frozenset()
    else:
        yield from (frozenset(m for m in every if n >> m & 1) for n in range(2 ** len(every)))


def _actions(problem: Problem, rank: int, merged: frozenset[int]) -> Iterator[Action]:
    own = [c for c, r in enumerate(problem.way) if r == rank]
    for m, c in product(range(problem.microbatches), own):
        yield Action(ActionKind.FORWARD, m, c)
        yield Action(ActionKind.BACKWARD if m in merged else ActionKind.BACKWARD_INPUT, m, c)
        if m not in merged:
            yield Action(ActionKind.BACKWARD_WEIGHT, m, c)


def _orders(
    problem: Problem, row: tuple[Action, ...], left: frozenset[Action], parts: dict[Action, float], memory_limit: float
) -> Iterator[tuple[Action, ...]]:
    if not left:
        yield row
    for action in left:
        if max(parts[action], 0.0) <= memory_limit * (1 + 1e-12) and not any(_needs(problem, action, a) for a in left):
            yield from _orders(problem, (*row, action), left - {action}, parts, memory_limit - parts[action])


def _needs(problem: Problem, a: Action, b: Action) -> bool:
    """True if an action waits for another one of its rank."""
    if a.microbatch != b.microbatch:
        in_order = problem.microbatches > 2 or problem.objective == "span" or len(problem.way) > problem.ranks
        return in_order and (a.kind, a.chunk) == (b.kind, b.chunk) and b.microbatch < a.microbatch
    if a.kind is ActionKind.FORWARD:
        return b.kind is ActionKind.FORWARD and b.chunk < a.chunk
    if a.kind is ActionKind.BACKWARD_WEIGHT:
        return b.kind is ActionKind.BACKWARD_INPUT and b.chunk == a.chunk
    return (b.kind is ActionKind.FORWARD and b.chunk == a.chunk) or (b.kind is a.kind and b.chunk > a.chunk)
