"""The schedule search is never worse than known schedules, keeps to memory, and gives a valid lower bound."""

from __future__ import annotations

import pytest

from meshwright.pipeline import (
    ChunkMemory,
    Times,
    check_schedule,
    linear,
    looped,
    one_f_one_b,
    simulate_schedule,
    zb_h1,
    zb_v,
    zigzag,
)
from meshwright.search import Problem, find_placement, find_schedule, lower_bound
from meshwright.search.scheduling.hints import known_tables

UNEQUAL = Times((100.0, 97.0, 109.0, 117.0), (100.0, 97.0, 109.0, 117.0), (70.0, 68.0, 76.0, 82.0), transfer=3.0)
PROBLEMS = [
    Problem(linear(4)[0], 8),
    Problem(linear(4)[0], 8, UNEQUAL, ChunkMemory(1.0, 0.5), 8.0),
    Problem(linear(3)[0], 6, Times(297.0, 294.0, 199.0, transfer=5.0), ChunkMemory(1.0, 0.5), 3.0, "span"),
    Problem(looped(2, 2)[0], 4, capacity=4.0),
    Problem(zigzag(3)[0], 6, capacity=6.0),
    Problem(linear(2)[0], 4, split=False),
]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_found_schedules_run_within_memory_and_above_the_bound(problem: Problem) -> None:
    found = find_schedule(problem, seconds=0)
    check_schedule(found.schedule, memory=problem.memory, capacity=problem.limits)
    assert problem.value(found.schedule) == found.value >= found.bound >= lower_bound(problem) - 1e-9
    assert all(found.value <= problem.value(s) for s in known_tables(problem))


def test_bounds_are_reached_by_known_optimal_schedules() -> None:
    """1F1B if the backward is whole, ZB-H1 with the memory of 1F1B."""
    whole = Problem(linear(4)[0], 8, capacity=4.0, split=False)
    assert lower_bound(whole) == simulate_schedule(one_f_one_b(4, 8)).makespan
    split = Problem(linear(4)[0], 8, capacity=4.0)
    assert lower_bound(split) == simulate_schedule(zb_h1(4, 8)).makespan


def test_the_best_placement_is_chosen() -> None:
    """On equal stages a V is faster than a line within the same memory."""
    half = Times(0.5, 0.5, 0.5)
    line = Problem(linear(4)[0], 8, capacity=4.0)
    v = Problem(zigzag(4)[0], 8, half, ChunkMemory(0.5), 4.0)
    found = find_placement([line, v], seconds=0)
    assert found.problem is v
    assert found.value <= simulate_schedule(zb_v(4, 8), half).makespan
    assert "makespan" in str(found)
