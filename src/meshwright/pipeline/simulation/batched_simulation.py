"""A table that is simulated for many sets of times at once, such as thousands of ways to place chunk boundaries."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..table.action import Action
from ..table.execution_order import Event, events_of, feasible_order, needs
from ..table.peak_memory import ChunkMemory
from ..table.schedule import Row, Schedule
from .simulator import Times, crossed


class _Step(NamedTuple):
    """One action of the table.

    `rank` runs it. `alike` numbers actions of equal length. `waits` are the events of other ranks that it waits for,
    with the two chunks of the message. `gives` are the events that other ranks wait for. Events on the same rank come
    earlier in its row.
    """

    rank: int
    alike: int
    waits: tuple[tuple[Event, tuple[int, int]], ...]
    gives: tuple[Event, ...]


class BatchedSimulation:
    """A table in a feasible order; the times per chunk may be arrays with one element for each case.

    >>> from meshwright.pipeline import one_f_one_b
    >>> runs = BatchedSimulation(one_f_one_b(2, 4))
    >>> forward = np.array([1.0, 2.0]), np.array([1.0, 1.0])
    >>> [float(seconds) for seconds in runs.makespans(Times(forward))]
    [15.0, 18.0]
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        order = [(rank, action, self._waits(rank, action)) for rank, action in feasible_order(schedule)]
        awaited = {event for *_, waits in order for event, _ in waits}
        self._alike: dict[Hashable, tuple[int, Action]] = {}
        self._steps = [
            _Step(
                rank,
                self._number(action),
                waits,
                tuple(event for event in events_of(action) if event in awaited),
            )
            for rank, action, waits in order
        ]
        self._alive = [np.array([*{*_alive(schedule, row)}], dtype=float) for row in schedule.rows]

    def _waits(self, rank: int, action: Action) -> tuple[tuple[Event, tuple[int, int]], ...]:
        needed = ((event, atom) for atom in action.atoms for event in needs(self.schedule, atom))
        hops = ((event, crossed(self.schedule, event, atom, rank)) for event, atom in needed)
        return tuple((event, hop) for event, hop in hops if hop is not None)

    def _number(self, action: Action) -> int:
        key = tuple((atom.kind, atom.chunk) for atom in action.atoms)
        return self._alike.setdefault(key, (len(self._alike), action))[0]

    def makespans(self, times: Times) -> NDArray[np.float64]:
        """Return the makespan that `simulate` computes, for each case."""
        lengths = [times.length(action) for _, action in self._alike.values()]
        free: list[Any] = [0.0] * self.schedule.ranks
        ended: dict[Event, Any] = {}
        for rank, alike, waits, gives in self._steps:
            start = free[rank]
            for event, hop in waits:
                start = np.maximum(start, ended[event] + times.message(*hop))
            free[rank] = start + lengths[alike]
            ended.update(dict.fromkeys(gives, free[rank]))
        return np.maximum.reduce(np.broadcast_arrays(*free))

    def peaks(self, held: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the peak memory of each rank (row) for each case, if a microbatch takes `held` in each chunk (row)."""
        return np.array([(alive @ held).max(axis=0) for alive in self._alive])


def _alive(schedule: Schedule, row: Row) -> Iterator[tuple[int, ...]]:
    """Yield, after each action, the number of microbatches of each chunk that a rank holds at once."""
    now, one = [0] * schedule.chunks, ChunkMemory()
    for action in row:
        most = [*now]
        for atom in action.atoms:
            change = int(one.change(schedule, atom))
            now[atom.chunk] += change
            most[atom.chunk] += max(change, 0)
        yield tuple(most)
