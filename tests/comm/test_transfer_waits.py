"""Waits for peers from the times of transfers, with a clock of the test's own."""

from __future__ import annotations

import pytest

from meshwright.comm.checking.transfer_waits import TransferWaits
from meshwright.comm.communicators.stragglers import Waits

GROUP = (0, 1, 2, 3)


class Counted(Waits):
    """Waits that are stored by peer."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[int, float] = {}

    def note(self, peer: int, seconds: float) -> None:
        self.seconds[peer] = seconds


def after_transfer(behind: bool, seconds: float) -> tuple[Counted, TransferWaits, int]:
    """Return the waits of a rank, and the time that it sends, after a transfer of this length."""
    now, counted = iter((100.0, 100.0 + seconds, 102.0, 103.0)), Counted()
    found = TransferWaits(counted, lambda: next(now))
    assert found.begin(GROUP) == 0
    found.end(GROUP, behind)
    return counted, found, found.begin(GROUP)


def test_waits_for_several_peers_do_not_add_up() -> None:
    counted, found, mine = after_transfer(behind=True, seconds=0.5)
    found.note(GROUP, mine, {1: 300_000, 2: 400_000, 3: 100_000})
    assert counted.seconds == pytest.approx({1: 0.2, 2: 0.0, 3: 0.2}, abs=1e-5)


def test_peers_that_came_earlier_or_sent_no_time_are_not_waited_for() -> None:
    counted, found, mine = after_transfer(behind=True, seconds=0.5)
    found.note(GROUP, mine, {1: 600_000, 2: 0})
    assert counted.seconds == {1: 0.0, 2: 0.0}


def test_waits_of_a_comparison_before_the_transfer_are_not_counted_twice() -> None:
    counted, found, mine = after_transfer(behind=False, seconds=0.5)
    assert mine
    found.note(GROUP, mine, {1: 100_000})
    assert not counted.seconds


def test_a_time_is_sent_once() -> None:
    _, found, mine = after_transfer(behind=True, seconds=0.25)
    assert mine == pytest.approx(250_000, abs=2)
    assert found.begin(GROUP) == 0
