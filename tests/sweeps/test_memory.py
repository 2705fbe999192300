"""The figure `memory`: the bytes counted from the program of a static step are those that its run allocates."""

from __future__ import annotations

import pytest

from benchmarks import memory
from benchmarks._static_models import Style
from meshwright.comm import simulate


def test_counted_bytes_equal_measured_bytes() -> None:
    ((counted, measured),) = simulate(lambda: memory.counted_and_measured(memory.llama(32), Style(("dp",), (1,))), 1)
    assert measured == pytest.approx(counted, rel=memory.HERE)
