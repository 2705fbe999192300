"""The figure `soak` at its smallest: it ends, and returns its samples."""

from __future__ import annotations

import pytest

from benchmarks._soak_run import KEEP, SIZES, Plan
from benchmarks.soak import STEPS, growth, samples_of_processes

pytestmark = pytest.mark.usefixtures("forked_processes")


def test_a_short_run_saves_loads_and_resizes() -> None:
    """A save in the background, one at the end of each block of steps, and a load before the static steps."""
    found = samples_of_processes("on_processes", 2, 40, 10, 20)
    assert len(found) == 2
    assert all(about["caches"] and about["last"]["step"] == 40 for about in found)


def test_every_size_comes_before_memory_is_sampled() -> None:
    plan = Plan(STEPS)
    sizes = list(plan.sizes())
    assert len(sizes) == STEPS
    assert set(sizes[plan.warm :]) <= set(sizes[: plan.warm])
    assert len(set(sizes)) > SIZES // 2
    assert not any(plan.is_sampled(step) for step in range(plan.warm))
    assert KEEP > 1


def test_growth_is_that_of_the_line() -> None:
    assert growth([{"step": n, "x": 3.0 * n} for n in (0, 10, 20)], "x") == 60.0
