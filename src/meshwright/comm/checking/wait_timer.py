"""Timing of a rank that waits for its peers: the time waited so far, and the time of the next check."""

from __future__ import annotations

import time

from ..launcher.process_state import ProcessState
from ..transport.rank_state import RankState

States = dict[int, RankState | None]
"""Rank → its state; None if its process has ended."""

_FIRST_LOOK, _BETWEEN_LOOKS = 0.25, 1.0
_BETWEEN_EXAMINATIONS = 0.5
_STILL_STOPPED = 0.4
"""Seconds for which a process must be seen stopped. A stopped job continues rank by rank."""
_OWN_PAUSE = 5.0
"""A rank that has not run for this many seconds was stopped itself, and so may all others have been."""
NOTICE = 4.0
"""A rank whose process runs causes a warning only after this multiple of the limit."""


class WaitTimer:
    """Timing of one wait: the time so far, the times of the next checks, and the last states of the ranks."""

    def __init__(self, limit: float, patience: float) -> None:
        self.limit, self.patience = limit, patience
        self._started = self._latest = time.monotonic()
        self._look_at = _FIRST_LOOK
        self._examine_at = min(limit, patience)
        self._before: States | None = None
        self._stopped: dict[int, float] = {}
        self._warned = False
        self.waited = 0.0

    def is_time(self) -> bool:
        """True once a second, when the processes of the awaited ranks need a check."""
        now = time.monotonic()
        if now - self._latest > _OWN_PAUSE:
            self._started += now - self._latest
            self._stopped.clear()
        self._latest, self.waited = now, now - self._started
        if self.waited < self._look_at:
            return False
        self._look_at = self.waited + _BETWEEN_LOOKS
        return True

    def is_late(self) -> bool:
        """True after the limit, and then repeatedly."""
        self.waited = time.monotonic() - self._started
        if self.waited < self._examine_at:
            return False
        self._examine_at = self.waited + _BETWEEN_EXAMINATIONS
        return True

    def examined(self) -> None:
        """Count the time of the examination as time in which this rank ran."""
        self._latest = time.monotonic()

    def start_again(self) -> None:
        """Reset the time waited, because a person debugs a rank."""
        self._started = time.monotonic()
        self._examine_at = self._look_at = _BETWEEN_LOOKS

    def slice(self) -> float:
        """Return the seconds to wait before the next check."""
        return min(max(min(self._examine_at, self._look_at) - self.waited, 0.05), 1.0)

    def note_life(self, peer: int, life: ProcessState) -> None:
        """Store the time since which the process of `peer` is stopped."""
        if life is ProcessState.STOPPED:
            self._stopped.setdefault(peer, time.monotonic())
        else:
            self._stopped.pop(peer, None)

    def is_still_stopped(self, peer: int) -> bool:
        """True if the process of `peer` was stopped at all recent checks."""
        return peer in self._stopped and time.monotonic() - self._stopped[peer] > _STILL_STOPPED

    def is_still(self, states: States) -> bool:
        """True if no rank has moved since the last examination."""
        still, self._before = states == self._before, states
        return still

    def warn_now(self) -> bool:
        """True once, when a rank is so late that a warning is due."""
        if self._warned or self.waited < min(NOTICE * self.limit, self.patience):
            return False
        self._warned = True
        return True
