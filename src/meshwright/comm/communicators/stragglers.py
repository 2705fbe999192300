"""Detection of slow ranks. A rank measures its waits for each peer, and asks the peer for the peer's own waits.

Time is divided into slices of at least half a second, of which the last ten count. A slice that is much longer than the
others contained a pause, such as a checkpoint, and is ignored. A peer is a straggler if it is waited for in most
slices, and for longer than it waits itself. Ranks that are slow in turns wait as long as they are waited for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

SLICES = 10
_SLICE = 0.5
_SHORTEST = 1e-3
"""Waits shorter than this (in seconds) count as time, but not as a wait."""
WARN_SHARE, WARN_WAIT = 0.2, 0.01
"""A warning needs this fraction of the time, and waits of this many seconds on average."""
LIST_SHARE = 0.1
_PAUSE = 4.0
"""A slice longer than this multiple of the median slice contains a pause."""
_MOST = 0.7
"""The fraction of the slices in which a straggler is waited for."""
_BETWEEN_WARNINGS = 60.0


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that others wait for.

    `share` is the fraction of the last seconds that it costs them, and `wait` the mean wait in seconds.
    """

    rank: int
    share: float
    wait: float

    def __str__(self) -> str:
        return f"rank {self.rank} costs {self.share:.0%} of the time ({self.wait * 1e3:.0f} ms for each wait)"


@dataclass(slots=True)
class _Slice:
    """Seconds and number of waits for each peer in one slice of time."""

    seconds: dict[int, float]
    counts: dict[int, int]
    length: float = 0.0

    def share(self, peer: int) -> float:
        return self.seconds.get(peer, 0.0) / self.length


class Waits:
    """The waits of one rank in the last slices of time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slices: deque[_Slice] = deque(maxlen=SLICES)
        self._now, self._began = _Slice({}, {}), clock()
        self._warn_at = 0.0
        self._suspects = False
        """Computed at the end of each slice, so that it costs nothing per call."""

    def note(self, peer: int, seconds: float) -> None:
        """Count a finished wait for `peer`."""
        now = self._now
        now.seconds[peer] = now.seconds.get(peer, 0.0) + seconds
        if seconds > _SHORTEST:
            now.counts[peer] = now.counts.get(peer, 0) + 1
        if self._clock() - self._began > _SLICE:
            self._turn()

    def share(self) -> float:
        """Return the fraction of the time in which this rank waits for others."""
        slices = self._usual()
        waited = sum(sum(each.seconds.values()) for each in slices)
        return waited / sum(each.length for each in slices) if slices else 0.0

    def by_peer(self) -> dict[int, Straggler]:
        """Return, for each peer, the fraction of the time in which this rank waits for it."""
        slices = self._usual()
        total = sum(each.length for each in slices)
        found: dict[int, Straggler] = {}
        for peer in {peer for each in slices for peer in each.seconds}:
            count = sum(each.counts.get(peer, 0) for each in slices)
            waited = sum(each.seconds.get(peer, 0.0) for each in slices)
            often = sum(each.share(peer) >= LIST_SHARE / 2 for each in slices) >= _MOST * len(slices)
            found[peer] = Straggler(peer, waited / total if often else 0.0, waited / max(count, 1))
        return found

    def stragglers(self, share_of: Callable[[int], float | None]) -> list[Straggler]:
        """Return the peers that are slower than this rank, the slowest first.

        `share_of` asks a peer for its own waits.
        """
        if len(self._slices) < SLICES // 2:
            return []
        found: list[Straggler] = []
        for each in self.by_peer().values():
            waits = share_of(each.rank) if each.share >= LIST_SHARE else None
            if waits is not None and each.share - waits >= LIST_SHARE:
                found.append(Straggler(each.rank, each.share - waits, each.wait))
        return sorted(found, key=lambda each: -each.share)

    def is_suspicious(self) -> bool:
        """True if a peer may need a warning; at most once in the time that `warned` sets."""
        return self._suspects and self._clock() >= self._warn_at

    def warned(self, seconds: float = _BETWEEN_WARNINGS) -> None:
        """Suppress warnings for this number of seconds."""
        self._warn_at = self._clock() + seconds

    def _usual(self) -> list[_Slice]:
        """Return the slices without a pause."""
        slices = list(self._slices)
        longest = _PAUSE * median([each.length for each in slices] or [0.0])
        return [each for each in slices if each.length <= longest]

    def _turn(self) -> None:
        now = self._clock()
        self._now.length = now - self._began
        self._slices.append(self._now)
        self._now, self._began = _Slice({}, {}), now
        self._suspects = len(self._slices) == SLICES and any(is_slow(each) for each in self.by_peer().values())


def is_slow(found: Straggler) -> bool:
    """True if a straggler needs a warning."""
    return found.share >= WARN_SHARE and found.wait >= WARN_WAIT
