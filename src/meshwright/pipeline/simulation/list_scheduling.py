"""List scheduling: at each time, each rank runs the most urgent action that is ready and fits into memory."""

from __future__ import annotations

from collections.abc import Sequence

from .._errors import ScheduleError
from ..table.action import Action, ActionKind
from ..table.peak_memory import ChunkMemory
from ..table.schedule import Schedule, Way, chunks_on
from .simulator import Clock, Times

ActionOrder = Sequence[tuple[ActionKind, int]]
"""Kinds and local chunks, the most urgent first; pairs that are not listed, such as weight gradients, come last."""


def list_schedule(
    name: str,
    way: Way,
    microbatches: int,
    rule: ActionOrder,
    times: Times,
    memory: ChunkMemory,
    limits: Sequence[float],
    most: Sequence[float] = (),
) -> Schedule:
    """Return the schedule in which every rank starts the earliest possible action, ties broken by `rule`.

    A forward leaves enough memory for one forward of each later chunk of its rank, so that microbatches in flight can
    continue. Chunk c holds the activations of at most `most[c]` microbatches. Chunks beyond the end
    of `most` have no such limit.

    Raises:
        ScheduleError: the memory is too small for that.
    """
    return _Table(name, way, microbatches, rule, times, memory, limits, most).filled()


class _Table:
    """The rows while they are filled."""

    def __init__(
        self,
        name: str,
        way: Way,
        m: int,
        rule: ActionOrder,
        times: Times,
        memory: ChunkMemory,
        limits: Sequence[float],
        most: Sequence[float],
    ) -> None:
        self.ranks = max(way) + 1
        self.shape = Schedule(name, (way,), m, ((),) * self.ranks)
        self.memory, self.limits, self.most, self.m = memory, limits, most, m
        self.clock = Clock(self.shape, times)
        self.own = [chunks_on(way, r) for r in range(self.ranks)]
        self.urgency = {pair: n for n, pair in enumerate(rule)}
        self.rows: list[list[Action]] = [[] for _ in range(self.ranks)]
        self.done = {(kind, c): 0 for kind in _ORDER for c in range(len(way))}
        self.held = [0.0] * self.ranks
        self.needed_bytes = {c: self._needed_bytes(c, way[c]) for c in range(len(way))}
        self.arrivals: dict[tuple[ActionKind, int], float | None] = {}
        """Kind and chunk → the time at which the inputs of the next such action are there, if it is known."""
        for c in range(len(way)):
            self._note_arrivals(c)

    def _needed_bytes(self, chunk: int, rank: int) -> float:
        """Return the memory that must be free for a forward: its own, and that of one forward of each later chunk."""
        return sum(self._change(Action(ActionKind.FORWARD, 0, c)) for c in self.own[rank] if c >= chunk)

    def _change(self, action: Action) -> float:
        return self.memory.change(self.shape, action)

    def filled(self) -> Schedule:
        best = [self._next(r) for r in range(self.ranks)]
        for _ in range(len(self.done) * self.m):
            ready = [(found[0], r, found[2]) for r, found in enumerate(best) if found is not None]
            if not ready:
                raise ScheduleError(
                    f"schedule {self.shape.name!r}",
                    f"memory for {min(self.limits):g} on a rank",
                    "no rank can continue",
                    "allow more memory: at least one microbatch of every chunk of a rank",
                )
            _, rank, action = min(ready)
            self._take(rank, action)
            for r in self.shape.neighbours[rank]:
                best[r] = self._next(r)
        return Schedule(self.shape.name, self.shape.ways, self.m, tuple(map(tuple, self.rows)))

    def _take(self, rank: int, action: Action) -> None:
        self.rows[rank].append(action)
        self.done[action.kind, action.chunk] += 1
        self.held[rank] += self._change(action)
        self.clock.run(rank, action)
        for c in (action.chunk - 1, action.chunk, action.chunk + 1):
            if 0 <= c < len(self.needed_bytes):
                self._note_arrivals(c)

    def _note_arrivals(self, chunk: int) -> None:
        """Note the arrivals of a chunk, which change with the actions of its neighbours and with its own."""
        rank = self.shape.ways[0][chunk]
        for kind in _ORDER:
            action = Action(kind, self.done[kind, chunk], chunk)
            self.arrivals[kind, chunk] = None if action.microbatch >= self.m else self.clock.arrival(rank, action)

    def _next(self, rank: int) -> tuple[float, int, Action] | None:
        """Return (start, urgency, action) of the next action of the rank; None if no action is ready."""
        found: list[tuple[float, int, Action]] = []
        for place, c in enumerate(self.own[rank]):
            for kind in _ORDER:
                arrival = self.arrivals[kind, c]
                if arrival is not None and self._fits(rank, kind, c):
                    urgency = self.urgency.get((kind, place), len(self.urgency))
                    start = max(self.clock.free[rank], arrival)
                    found.append((start, urgency, Action(kind, self.done[kind, c], c)))
        return min(found, default=None)

    def _fits(self, rank: int, kind: ActionKind, chunk: int) -> bool:
        """True if the rank has memory for an action; only forwards take memory."""
        if kind is not ActionKind.FORWARD:
            return True
        alive = self.done[kind, chunk] - self.done[ActionKind.BACKWARD_WEIGHT, chunk]
        is_full = chunk < len(self.most) and alive + 1 > self.most[chunk]
        return not is_full and self.held[rank] + self.needed_bytes[chunk] <= self.limits[rank]


_ORDER = (ActionKind.BACKWARD_INPUT, ActionKind.FORWARD, ActionKind.BACKWARD_WEIGHT)
