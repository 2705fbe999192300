"""The contenders of the figure `static_speed` make the same steps; nothing is compiled or timed here."""

from __future__ import annotations

import pytest

from benchmarks import static_speed
from benchmarks.static_speed import Case

pytestmark = pytest.mark.usefixtures("forked_processes")


def test_all_contenders_give_the_losses_of_one_device() -> None:
    found = static_speed.measure(Case("smallest", dp=2, tp=2), turns=2, env={"STATIC_SPEED_UNCOMPILED": "1"})
    assert not found["failed"]
    assert set(found["loss_difference"]) == {"ours", *static_speed.RIVALS}
    assert static_speed.agree(found)
