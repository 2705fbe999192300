"""How long a rank has waited for its peers, and when it looks at them again."""

from __future__ import annotations

import time

from ._life import Life
from ._state import State

States = dict[int, State | None]
"""By rank, what it is doing; None where its process is gone."""

_FIRST_LOOK, _BETWEEN_LOOKS = 0.25, 1.0
_BETWEEN_EXAMINATIONS = 0.5
_STILL_STOPPED = 0.4
"""A process is stopped if it was seen so for this time in seconds: a job that goes on does so rank by rank."""
_OWN_PAUSE = 5.0
"""A rank that has not run for so long was stopped itself, and so may all others have been."""
NOTICE = 4.0
"""A rank whose process runs is late, and no more, until it was waited for this many times the limit."""


class Watch:
    """How long a rank has waited, when to look again, and whether anything has moved since."""

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
        """True once a second: the processes of those that are waited for want a look."""
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
        """True at the limit, and often from then on."""
        self.waited = time.monotonic() - self._started
        if self.waited < self._examine_at:
            return False
        self._examine_at = self.waited + _BETWEEN_EXAMINATIONS
        return True

    def examined(self) -> None:
        """Count what the examination took as time in which this rank ran."""
        self._latest = time.monotonic()

    def start_again(self) -> None:
        """What was waited does not count: a person looks at a rank."""
        self._started = time.monotonic()
        self._examine_at = self._look_at = _BETWEEN_LOOKS

    def slice(self) -> float:
        """Seconds to wait before the next look."""
        return min(max(min(self._examine_at, self._look_at) - self.waited, 0.05), 1.0)

    def note_life(self, peer: int, life: Life) -> None:
        """Remember since when the process of `peer` is stopped."""
        if life is Life.STOPPED:
            self._stopped.setdefault(peer, time.monotonic())
        else:
            self._stopped.pop(peer, None)

    def is_still_stopped(self, peer: int) -> bool:
        """True if the process of `peer` was stopped at the looks of the last moments."""
        return peer in self._stopped and time.monotonic() - self._stopped[peer] > _STILL_STOPPED

    def is_still(self, states: States) -> bool:
        """True if no rank has moved since the last examination."""
        still, self._before = states == self._before, states
        return still

    def warn_now(self) -> bool:
        """True once, when a rank is so late that its user wants to know."""
        if self._warned or self.waited < min(NOTICE * self.limit, self.patience):
            return False
        self._warned = True
        return True
