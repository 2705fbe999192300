"""ZB-1p and ZB-2p: forwards and weight gradients placed by times and memory (arXiv 2401.10241, section 3.1).

First each rank runs as many forwards as fit before the first backward arrives. Then all ranks run a forward and a
backward in turn. Weight gradients fill waits that would make a rank wait longer than any other, and free memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from .._errors import ScheduleError
from ..simulation.simulator import Times, simulate_schedule
from ..table.action import Action, ActionKind
from ..table.peak_memory import ChunkMemory, chunk_value
from ..table.schedule import Schedule, linear
from .flush_schedules import require_counts

_KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
F, B, W = range(3)


def zb_1p(ranks: int, microbatches: int, times: Times | None = None, memory: ChunkMemory | None = None) -> Schedule:
    """The best of the heuristic's tables that hold no more than 1F1B does: p microbatches."""
    return zero_bubble("ZB-1p", ranks, microbatches, ranks, times, memory)


def zb_2p(ranks: int, microbatches: int, times: Times | None = None, memory: ChunkMemory | None = None) -> Schedule:
    """The best of the heuristic's tables that hold no more than 2p microbatches."""
    return zero_bubble("ZB-2p", ranks, microbatches, 2 * ranks, times, memory)


def zero_bubble(
    name: str,
    ranks: int,
    microbatches: int,
    capacity: float,
    times: Times | None = None,
    memory: ChunkMemory | None = None,
) -> Schedule:
    """Return the table of least span that holds at most `capacity` on each rank.

    Raises ScheduleError if there is none.
    """
    require_counts(name, ranks, microbatches)
    times, memory = times or Times(), memory or ChunkMemory(kept=0.5)
    found: list[tuple[float, float, Schedule]] = []
    for choice in product((True, False), repeat=3):
        table = _Table(ranks, microbatches, capacity, times, memory, *choice)
        if table.fill():
            schedule = Schedule(name, linear(ranks), microbatches, tuple(map(tuple, table.rows)))
            line = simulate_schedule(schedule, times)
            found.append((line.span, line.makespan, schedule))
    if not found:
        raise ScheduleError(
            f"schedule {name!r}",
            f"memory for {capacity:g} on {ranks} ranks",
            "a rank must hold at least one microbatch from its forward to its weight gradients",
            f"use a capacity of at least {chunk_value(memory.held, 0):g}",
        )
    return min(found, key=lambda f: f[:2])[2]


@dataclass
class _Rank:
    """State of a rank: the end of its row, the memory it holds, and the time it has waited since its first forward."""

    done: list[int]
    free: float = 0.0
    held: float = 0.0
    waited: float = 0.0


class _FullError(Exception):
    """The next required action does not fit into memory."""


class _Table:
    """A table that is filled action by action, each at its earliest time.

    `past_first` lets forwards delay the first backward. `backward_first` delays a forward that the next rank could not
    run before its next backward. `fill_all` puts weight gradients into short waits too.
    """

    def __init__(
        self,
        ranks: int,
        microbatches: int,
        capacity: float,
        times: Times,
        memory: ChunkMemory,
        past_first: bool,
        backward_first: bool,
        fill_all: bool,
    ) -> None:
        self.p, self.m, self.capacity, self.times = ranks, microbatches, capacity, times
        self.past_first, self.backward_first, self.fill_all = past_first, backward_first, fill_all
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.state = [_Rank([0, 0, 0]) for _ in range(ranks)]
        self.ended: dict[tuple[int, int, int], float] = {}
        self.cost = [[times.of(Action(kind, 0, r)) for r in range(ranks)] for kind in _KINDS]
        shape = Schedule("", linear(ranks), microbatches, ((),) * ranks)
        self.change = [[memory.change(shape, Action(kind, 0, r)) for r in range(ranks)] for kind in _KINDS]

    def fill(self) -> bool:
        """True if all actions found a place within memory."""
        try:
            self._warm_up()
            for m in range(1, self.m):
                self._forwards(self._wanted())
                self._backwards(m)
        except _FullError:
            return False
        for r, state in enumerate(self.state):
            while state.done[W] < self.m:
                self._put(r, W)
        return True

    def _arrival(self, r: int, kind: int) -> float:
        """Return the time at which the next input of `kind` arrives at a rank, from the rank before or after it."""
        source = r - 1 if kind == F else r + 1
        if kind == W or not 0 <= source < self.p:
            return 0.0
        return self.ended[kind, source, self.state[r].done[kind]] + self.times.message(r, source)

    def _put(self, r: int, kind: int) -> None:
        state = self.state[r]
        start = max(state.free, self._arrival(r, kind))
        if state.done[F]:
            state.waited += start - state.free
        state.free = start + self.cost[kind][r]
        self.ended[kind, r, state.done[kind]] = state.free
        state.held += self.change[kind][r]
        self.rows[r].append(Action(_KINDS[kind], state.done[kind], r))
        state.done[kind] += 1

    def _warm_up(self) -> None:
        """Run the first microbatch, and the forwards that fit before its backward returns."""
        for r in range(self.p):
            if self.change[F][r] > self.capacity:
                raise _FullError
            self._put(r, F)
        extra = [0] * self.p
        back = 0.0
        for r in reversed(range(self.p)):
            back = self._fitting(r, extra, back) if r < self.p - 1 else self.state[r].free + self.cost[B][r]
        for r in range(1, self.p):
            extra[r] = min(extra[r], extra[r - 1])
            while 0 < extra[r] >= extra[r - 1] and self.state[r].done[F] + extra[r] < self.m:
                extra[r] -= 1
        for r, n in enumerate(extra):
            for _ in range(n):
                self._put(r, F)
        for r in reversed(range(self.p)):
            self._put(r, B)

    def _fitting(self, r: int, extra: list[int], back: float) -> float:
        """Count forwards of rank r into `extra` that fit before `back`; return the end of its first backward."""
        state, cost = self.state[r], self.cost[F][r]
        held, end, back = state.held, state.free, back + self.times.message(r, r + 1)
        while state.done[F] + extra[r] < self.m and held + self.change[F][r] <= self.capacity:
            if (end + cost > back) if self.past_first else (end >= back):
                break
            held, end, extra[r] = held + self.change[F][r], end + cost, extra[r] + 1
        return max(end, back) + self.cost[B][r]

    def _wanted(self) -> list[bool]:
        """Return, for each rank, True if it runs a forward in this round. No rank does so unless the next rank does."""
        wanted = [state.done[F] < self.m and not self._holds_back(r) for r, state in enumerate(self.state)]
        for r in reversed(range(self.p - 1)):
            wanted[r] = wanted[r] and (wanted[r + 1])
        return wanted

    def _holds_back(self, r: int) -> bool:
        """True if a forward of rank r now would arrive too late for the next rank, and delay its own backward."""
        if not self.backward_first or r == self.p - 1:
            return False
        state, after = self.state[r], self.state[r + 1]
        if state.done[F] < after.done[F] + 2:
            return False
        next_end = after.free + self.cost[F][r + 1] + self.cost[B][r + 1] + self.times.message(r, r + 1)
        if state.free >= next_end:
            return True
        held, weights, n = state.held + self.change[F][r], 0.0, state.done[W]
        while held > self.capacity and n < state.done[B]:
            held, weights, n = held + self.change[W][r], weights + self.cost[W][r], n + 1
        if state.free + self.cost[F][r] + weights <= next_end:
            return False
        return next_end - state.free <= self._longest_wait() - state.waited

    def _longest_wait(self) -> float:
        return max(0.0, *(state.waited for state in self.state))

    def _forwards(self, wanted: Sequence[bool]) -> None:
        for r in range(self.p):
            if wanted[r]:
                self._make_room(r, F)
                self._fill_wait(r, F)
                self._put(r, F)

    def _backwards(self, m: int) -> None:
        for r in reversed(range(self.p)):
            self._make_room(r, B)
            self._fill_wait(r, B)
            if r == 0 and self.state[r].done[F] == self.m:
                while self.state[r].done[W] < self.state[r].done[B]:
                    self._put(r, W)
            self._put(r, B)

    def _make_room(self, r: int, kind: int) -> None:
        state = self.state[r]
        while state.held + self.change[kind][r] > self.capacity:
            if state.done[W] >= state.done[B]:
                raise _FullError
            self._put(r, W)

    def _fill_wait(self, r: int, kind: int) -> None:
        """Run weight gradients that end before the next input arrives; one more if the wait is long."""
        state, arrival, cost = self.state[r], self._arrival(r, kind), self.cost[W][r]
        while state.done[W] < state.done[B] and state.free + cost <= arrival:
            self._put(r, W)
        if state.done[W] < state.done[B] and state.free < arrival:
            short = arrival - state.free <= self._longest_wait() - state.waited
            if self.fill_all or not short:
                self._put(r, W)
