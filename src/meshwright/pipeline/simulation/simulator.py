"""Simulator of tables: start and end of each action, from the times of actions and messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..table.action import COMPUTES, RECEIVES, SENDS, Action, ActionKind
from ..table.execution_order import Event, events_of, feasible_order, needs
from ..table.peak_memory import ChunkMemory, chunk_value, peaks
from ..table.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one microbatch per chunk: one number per chunk, or one number for all chunks.

    `transfer` is the time of a message between two ranks, per edge that begins at a chunk. `overhead` is the time of
    each action before it begins. BW takes as long as B and W. `slowdown` is the time of two actions side by side, as a
    fraction of their sum.
    """

    forward: float | tuple[float, ...] = 1.0
    backward: float | tuple[float, ...] = 1.0
    weight: float | tuple[float, ...] = 1.0
    transfer: float | tuple[float, ...] = 0.0
    recompute: float | tuple[float, ...] | None = None
    gather: float | tuple[float, ...] = 0.0
    scatter: float | tuple[float, ...] = 0.0
    optimizer: float = 0.0
    overhead: float = 0.0
    slowdown: float = 1.0

    @property
    def recomputed_forward(self) -> float | tuple[float, ...]:
        """Seconds of a recomputed forward pass: those of the first one, unless `recompute` says otherwise."""
        return self.forward if self.recompute is None else self.recompute

    def of(self, action: Action) -> float:
        """Return the seconds of one action (one atom), without overhead."""
        c = action.chunk
        match action.kind:
            case ActionKind.FORWARD:
                return chunk_value(self.forward, c)
            case ActionKind.BACKWARD_INPUT:
                return chunk_value(self.backward, c)
            case ActionKind.BACKWARD_WEIGHT:
                return chunk_value(self.weight, c)
            case ActionKind.BACKWARD:
                return chunk_value(self.backward, c) + chunk_value(self.weight, c)
            case ActionKind.RECOMPUTE:
                return chunk_value(self.recomputed_forward, c)
            case ActionKind.GATHER:
                return chunk_value(self.gather, c)
            case ActionKind.SCATTER:
                return chunk_value(self.scatter, c)
            case ActionKind.OPTIMIZER:
                return self.optimizer
            case _:
                return 0.0

    def length(self, action: Action) -> float:
        """Return the seconds for which an action, with the actions beside it, occupies its rank."""
        if action.beside is None:
            return self.overhead + self.of(action)
        return self.overhead + sum(map(self.of, action.atoms)) * self.slowdown

    def of_chunk(self, chunk: int) -> tuple[float, float, float]:
        """Return the seconds of a chunk's F, B and W."""
        return chunk_value(self.forward, chunk), chunk_value(self.backward, chunk), chunk_value(self.weight, chunk)

    def message(self, source: int, target: int) -> float:
        """Return the seconds of a message between two chunks."""
        return chunk_value(self.transfer, min(source, target))


class TimedAction(NamedTuple):
    """An action with its start and its end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Start and end of every action of a schedule, in seconds from the start."""

    schedule: Schedule
    times: Times
    rows: tuple[tuple[TimedAction, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """Time from the first start to the last end over all ranks: a step whose optimizer waits for all ranks."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @cached_property
    def span(self) -> float:
        """Longest time of one rank from its own start to its own end.

        It is the time of a step whose optimizer does not wait for other ranks.
        """
        return max((row[-1].end - row[0].start for row in self.rows if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Compute seconds of each rank."""
        found = [0.0] * self.schedule.ranks
        for rank, atom in self.schedule.atoms():
            if atom.kind in COMPUTES:
                found[rank] += self.times.of(atom)
        return tuple(found)

    @property
    def bubble(self) -> float:
        """Fraction of the makespan in which ranks do not compute."""
        return 1 - sum(self.busy) / (len(self.rows) * self.makespan)

    @property
    def span_bubble(self) -> float:
        """Fraction of the span in which the busiest rank does not compute, as in zero-bubble papers."""
        return 1 - max(self.busy) / self.span

    def peaks(self, memory: ChunkMemory | None = None) -> tuple[float, ...]:
        """Return the peak memory of each rank."""
        return peaks(self.schedule, memory)


def simulate_schedule(schedule: Schedule, times: Times | None = None) -> Timeline:
    """Start each action as early as its rank and its inputs allow. Raises ScheduleError if ranks deadlock.

    >>> from meshwright.pipeline import one_f_one_b
    >>> simulate_schedule(one_f_one_b(4, 8)).makespan
    33.0
    """
    clock = Clock(schedule, times or Times())
    rows: list[list[TimedAction]] = [[] for _ in range(schedule.ranks)]
    for rank, action in feasible_order(schedule):
        rows[rank].append(clock.run(rank, action))
    return Timeline(schedule, clock.times, tuple(map(tuple, rows)))


class Clock:
    """The end of each event so far, and the time from which each rank is free."""

    def __init__(self, schedule: Schedule, times: Times) -> None:
        self.schedule, self.times = schedule, times
        self.free = [0.0] * schedule.ranks
        self._ended: dict[Event, float] = {}

    def start(self, rank: int, action: Action) -> float | None:
        """Return the earliest start of an action on a rank; None if an event that it needs has not happened yet."""
        arrival = self.arrival(rank, action)
        return None if arrival is None else max(self.free[rank], arrival)

    def arrival(self, rank: int, action: Action) -> float | None:
        """Return the time at which a rank has all inputs of an action; None if one of them is not computed yet."""
        arrival = 0.0
        for atom in action.atoms:
            for event in needs(self.schedule, atom):
                if event not in self._ended:
                    return None
                hop = crossed(self.schedule, event, atom, rank)
                arrival = max(arrival, self._ended[event] + (self.times.message(*hop) if hop else 0.0))
        return arrival

    def run(self, rank: int, action: Action) -> TimedAction:
        """Run the action at its earliest start."""
        start = self.start(rank, action)
        assert start is not None
        end = self.free[rank] = start + self.times.length(action)
        self._ended.update(dict.fromkeys(events_of(action), end))
        return TimedAction(action, start, end)


def crossed(schedule: Schedule, event: Event, atom: Action, rank: int) -> tuple[int, int] | None:
    """Return the two chunks between which the output of `event` travels to `atom` on `rank`.

    None if no message is needed.
    """
    target = atom.other_end if atom.kind in RECEIVES else atom.chunk
    if event.kind in SENDS:
        return event.chunk, target
    crosses = event.chunk != target and schedule.rank_of(event.microbatch, event.chunk) != rank
    return (event.chunk, target) if crosses and not schedule.has_transfers else None
