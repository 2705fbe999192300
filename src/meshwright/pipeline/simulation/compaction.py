"""Compaction of a table: an action that could run while its rank waits runs then, if memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..table.action import Action
from ..table.peak_memory import ChunkMemory, peaks
from ..table.schedule import Schedule
from .simulator import Clock, Times

AHEAD = 64
"""Number of places of a row that are searched for an action that can run earlier."""


def compacted(
    schedule: Schedule,
    times: Times | None = None,
    memory: ChunkMemory | None = None,
    capacity: float | Sequence[float] | None = None,
) -> Schedule:
    """Return the same actions, with each rank running the first action in its row that can run at that time.

    No rank holds more than `capacity` (default: its peak before).
    """
    memory = memory or ChunkMemory()
    most = peaks(schedule, memory) if capacity is None else capacity
    limits = most if isinstance(most, Sequence) else [most] * schedule.ranks
    return _Compaction(schedule, times or Times(), memory, limits).result()


class _Compaction:
    """The remaining actions of each row, and the new rows."""

    def __init__(self, schedule: Schedule, times: Times, memory: ChunkMemory, limits: Sequence[float]) -> None:
        self.schedule, self.memory, self.limits = schedule, memory, limits
        self.clock = Clock(schedule, times)
        self.left = [list(row) for row in schedule.rows]
        self.rows: list[list[Action]] = [[] for _ in schedule.rows]
        self.held = [0.0] * schedule.ranks

    def result(self) -> Schedule:
        best = [self._next(r) for r in range(self.schedule.ranks)]
        while any(self.left):
            _, rank, place = min((found[0], r, found[1]) for r, found in enumerate(best) if found is not None)
            self._take(rank, place)
            for r in self.schedule.neighbours[rank]:
                best[r] = self._next(r)
        return replace(self.schedule, rows=tuple(map(tuple, self.rows)))

    def _take(self, rank: int, place: int) -> None:
        action = self.left[rank].pop(place)
        self.rows[rank].append(action)
        self.held[rank] += self._change(action)
        self.clock.run(rank, action)

    def _change(self, action: Action) -> float:
        return sum(self.memory.change(self.schedule, atom) for atom in action.atoms)

    def _next(self, rank: int) -> tuple[float, int] | None:
        """Return the earliest start of this rank's next action, and its place in the remaining row."""
        best: tuple[float, int] | None = None
        for place, action in enumerate(self.left[rank][:AHEAD]):
            start = self.clock.start(rank, action)
            if start is None or (best is not None and start >= best[0]):
                continue
            if place == 0 or self._fits(rank, place):
                best = start, place
            if start <= self.clock.free[rank]:
                break
        return best

    def _fits(self, rank: int, place: int) -> bool:
        """True if the rank stays within its limit when the action at `place` runs first."""
        moved = self.left[rank][place]
        if (added := self._change(moved)) <= 0:
            return True
        now = self.held[rank] + added
        for action in self.left[rank][:place]:
            if now > self.limits[rank]:
                return False
            now += self._change(action)
        return now <= self.limits[rank]
