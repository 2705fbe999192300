"""A pipeline whose stages are compiled to kernels."""

from __future__ import annotations

import meshwright as mw
from tests.pipeline.oracle import alone, compare, piped


def test_kernels() -> None:
    options = {"accumulate_steps": 2, "schedule_mode": "1F1B"}  # a split backward pass would be two programs to compile
    found = mw.simulate(lambda: piped((0, 1), options, 4, compiler="inductor"), 2)
    for each in found:
        compare(each, alone(2, 2, 4))
