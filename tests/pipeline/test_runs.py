"""Tables that are run with many times at once, beside the simulator that runs one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from meshwright.pipeline import KNOWN, Memory, Runs, Schedule, Times, peaks, simulate

CASES = 5


def made(name: str) -> Schedule:
    how = KNOWN[name]
    numbers = (4, 4) if name == "Chimera" else (4, 8)
    return how.make(*numbers, 2) if how.takes else how.make(*numbers)


@pytest.mark.parametrize("name", KNOWN)
def test_many_at_once_take_what_each_takes(name: str) -> None:
    table, draw = made(name), random.Random(0)
    rows = [[[draw.uniform(0.5, 2) for _ in range(CASES)] for _ in range(table.chunks)] for _ in range(5)]
    runs = Runs(table)
    arrays = [tuple(map(np.array, row)) for row in rows]
    seconds = runs.makespans(Times(*arrays[:4], overhead=0.1, slowdown=0.8))  # pyright: ignore[reportArgumentType] - arrays
    held = runs.peaks(np.array(rows[4]))
    for n in range(CASES):
        forward, backward, weight, transfer, each = (tuple(chunk[n] for chunk in row) for row in rows)
        line = simulate(table, Times(forward, backward, weight, transfer, overhead=0.1, slowdown=0.8))
        assert seconds[n] == pytest.approx(line.makespan)
        assert held[:, n] == pytest.approx(peaks(table, Memory(held=each)))
