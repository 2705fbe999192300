"""Facts about pipeline schedules that the price of a plan depends on: chunks, places, bubble, memory, table size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshwright.cost import Flags, Numbers
from meshwright.pipeline import looped, zigzag

from .._errors import SearchError

Alive = Callable[[Numbers, Numbers, Numbers, Numbers], Numbers]
"""Microbatches in flight by ranks, microbatches, chunks per rank, and rank; in units of all layers of the rank."""
Fits = Callable[[Numbers, Numbers, Numbers], Flags]
"""True if the schedule has a table for so many ranks, microbatches, and chunks per rank."""


@dataclass(frozen=True)
class ScheduleFacts:
    """Facts about one schedule.

    `filling` is the bubble per other rank, in multiples of F, B and W of a rank's layers: closed forms of the papers.
    `chunks` is the number of chunks on each rank, or None if it may be any number above one. `table` is the number of
    chunks times microbatches up to which a table is made in a short time. `making` is the work of making a table,
    relative to simulating it.
    """

    filling: tuple[float, float, float]
    alive: Alive
    chunks: int | None = 1
    in_a_v: bool = False
    table: int = 2**13
    making: int = 0
    fits: Fits = lambda p, m, v: np.full(np.shape(p), True)

    def has_chunks(self, chunks: Numbers) -> Flags:
        """True if the schedule is searched with so many chunks on each rank."""
        return np.asarray(chunks) > 1 if self.chunks is None else np.asarray(chunks) == self.chunks


def _whole_groups(p: Numbers, m: Numbers, v: Numbers) -> Flags:
    return np.mod(m, p) == 0


def _twice(p: Numbers, m: Numbers, v: Numbers) -> Flags:
    return np.asarray(m) >= 2 * np.asarray(p)


FLUSH, LATE, NONE = (1.0, 1.0, 1.0), (1.0, 1.0, -1.0), (0.0, 0.0, 0.0)
SCHEDULE_FACTS = {
    "GPipe": ScheduleFacts(FLUSH, lambda p, m, v, r: m),
    "1F1B": ScheduleFacts(FLUSH, lambda p, m, v, r: p - r),
    "Eager 1F1B": ScheduleFacts(FLUSH, lambda p, m, v, r: 2 * (p - r) - 1),
    "Interleaved 1F1B": ScheduleFacts(
        FLUSH, lambda p, m, v, r: (p * (v - 1) + 1 + 2 * (p - r - 1)) / v, None, fits=_whole_groups
    ),
    "Looped BFS": ScheduleFacts(FLUSH, lambda p, m, v, r: m, None),
    "Interleaved zero bubble": ScheduleFacts(LATE, lambda p, m, v, r: p, None, fits=_whole_groups),
    "ZB-H1": ScheduleFacts(LATE, lambda p, m, v, r: p),
    "ZB-1p": ScheduleFacts(LATE, lambda p, m, v, r: p, table=2**11, making=20),
    "ZB-H2": ScheduleFacts((1.0, 1.0, -2.0), lambda p, m, v, r: 2 * p - 1),
    "ZB-2p": ScheduleFacts(NONE, lambda p, m, v, r: 2 * p - 1, table=2**11, making=20),
    "ZB-V": ScheduleFacts((0.5, 0.0, 0.0), lambda p, m, v, r: p, 2, True, 2**11, 6),
    "V-Half": ScheduleFacts((0.5, 0.5, 0.5), lambda p, m, v, r: np.floor(p / 2) + 1, 2, True, 2**9, 50),
    "V-Min": ScheduleFacts((2 / 3, 2 / 3, 2 / 3), lambda p, m, v, r: np.floor((p + 4) / 3), 2, True, 2**9, 50),
    "Wave": ScheduleFacts((0.5, 0.5, 0.0), lambda p, m, v, r: p, None, True, 2**11, 6),
    "DualPipe-V": ScheduleFacts((1.0, 0.0, 0.0), lambda p, m, v, r: p + 0.5, 2, True, fits=_twice),
}
"""Schedule → its facts. The bubbles of V-Half, V-Min and Wave are rough: they only decide what is simulated."""
DOUBLE = frozenset({"ZB-2p", "ZB-H2"})
"""Schedules with twice as many microbatches in flight as ranks."""


def facts_of(schedule: str) -> ScheduleFacts:
    """Return the facts about a schedule.

    Raises:
        SearchError: the price of the schedule is unknown.
    """
    if schedule not in SCHEDULE_FACTS:
        raise SearchError(
            f"a plan with the schedule {schedule!r}",
            "a schedule without a formula for its bubble",
            f"formulas exist for {', '.join(SCHEDULE_FACTS)}",
            'write Plan(schedule="1F1B")',
        )
    return SCHEDULE_FACTS[schedule]


def check_chunks(schedule: str, chunks: Numbers) -> None:
    """Raise SearchError if the price of the schedule is unknown, or if it cannot run with so many chunks per rank."""
    facts = facts_of(schedule)
    if facts.chunks is not None and np.any(np.asarray(chunks) != facts.chunks):
        raise SearchError(
            f"a plan with the schedule {schedule!r}",
            f"chunks = {int(np.max(chunks))}",
            f"in this schedule, each rank of the pipeline has {facts.chunks} of the model's chunks",
            f"write chunks = {facts.chunks}, or another schedule",
        )


def placement(schedule: str, ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the pipeline rank of each part of a model, from its first part to its last.

    >>> placement("ZB-V", 3, 2)
    (0, 1, 2, 2, 1, 0)
    """
    return (zigzag if facts_of(schedule).in_a_v else looped)(ranks, chunks)[0]


def microbatches_in_flight(schedule: str, p: Numbers, m: Numbers, v: Numbers, rank: Numbers) -> Numbers:
    """Return the most microbatches in flight on a rank; a chunk counts by its share of the rank's layers."""
    return np.where(np.asarray(p) > 1, np.minimum(m, facts_of(schedule).alive(p, m, v, rank)), 1.0)
