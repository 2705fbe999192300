"""Waits for peers in transfers that are not preceded by a comparison.

Such a transfer contains the wait for the last rank, so one rank alone cannot tell the wait from the movement of data.
All ranks leave a transfer at nearly the same time. So a rank that was in it for less time than another one came later,
by the difference. Each rank therefore sends the time of a transfer with its next frame of the group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ..communicators.call import Group
from ..communicators.stragglers import Waits

_MICRO = 1e-6


class TransferWaits:
    """Times of the latest transfers of one rank, and the waits that follow from them and from those of the peers."""

    def __init__(self, waits: Waits, clock: Callable[[], float] = time.perf_counter) -> None:
        self._waits, self._clock = waits, clock
        self._arrived = 0.0
        self._ended: dict[Group, tuple[int, bool]] = {}
        """Group → microseconds of its latest transfer, and whether that was compared behind."""
        self._behind: dict[Group, bool] = {}
        """Group → whether the transfer was compared behind whose time was sent last."""

    def begin(self, group: Group) -> int:
        """Mark that this rank has come to a transfer. Return the microseconds of the latest one of the group.

        They are returned once, and are 0 if there is none or if it has failed.
        """
        self._arrived = self._clock()
        microseconds, self._behind[group] = self._ended.pop(group, (0, False))
        return microseconds

    def end(self, group: Group, behind: bool) -> None:
        """Mark that the transfer has ended."""
        self._ended[group] = int((self._clock() - self._arrived) / _MICRO) + 1, behind

    def note(self, group: Group, mine: int, of_peers: Mapping[int, int]) -> None:
        """Count the waits in a transfer, for the microseconds that this rank and its peers were in it.

        The waits for several peers do not add up: a wait for a peer begins when the peers before it have come. If this
        rank compared the call first, its waits were counted then.
        """
        if not mine or not self._behind.get(group):
            return
        waited = 0
        for peer, theirs in of_peers.items():
            late = max(mine - theirs, waited) if theirs else waited
            self._waits.note(peer, (late - waited) * _MICRO)
            waited = late
