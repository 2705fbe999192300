"""Execution order of a table: a feasible order of all actions, or the actions at which ranks deadlock.

Each action waits for named events; messages are found by their tags, and a send never waits. So the set of completed
actions does not depend on the order in which ranks are visited, and one walk decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from .._errors import ScheduleError
from .action import Action, ActionKind
from .schedule import Schedule


class Event(NamedTuple):
    """An event in a table: a chunk's output, input gradient or weight gradient is computed."""

    kind: ActionKind
    microbatch: int
    chunk: int


_GIVES = {
    ActionKind.FORWARD: (ActionKind.FORWARD,),
    ActionKind.BACKWARD: (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT),
    ActionKind.BACKWARD_INPUT: (ActionKind.BACKWARD_INPUT,),
    ActionKind.BACKWARD_WEIGHT: (ActionKind.BACKWARD_WEIGHT,),
    ActionKind.RECOMPUTE: (ActionKind.RECOMPUTE,),
}
_BEHIND = {
    ActionKind.RECOMPUTE: ActionKind.FORWARD,
    ActionKind.BACKWARD_WEIGHT: ActionKind.BACKWARD_INPUT,
}
"""Kinds that follow one other action of the same chunk and microbatch → the kind of that action."""


def events(action: Action) -> Iterator[Event]:
    """Yield the events that have happened when `action` (one atom) has ended."""
    for kind in _GIVES.get(action.kind, ()):
        yield Event(kind, action.microbatch, action.chunk)


def events_of(action: Action) -> Iterator[Event]:
    """Yield the events that have happened when `action`, with the actions beside it, has ended."""
    for atom in action.atoms:
        yield from events(atom)


def needs(schedule: Schedule, action: Action) -> Iterator[Event]:
    """Yield the events that must happen before `action` (one atom) begins."""
    kind, m, c = action.kind, action.microbatch, action.chunk
    if kind is ActionKind.FORWARD:
        for e in schedule.into[c]:
            yield Event(ActionKind.FORWARD, m, e.source)
    elif kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
        yield from _needs_of_backward(schedule, m, c)
    elif kind in _BEHIND:
        yield Event(_BEHIND[kind], m, c)


def _needs_of_backward(schedule: Schedule, m: int, c: int) -> Iterator[Event]:
    yield Event(ActionKind.RECOMPUTE if (m, c) in schedule.recomputed else ActionKind.FORWARD, m, c)
    for e in schedule.out_of[c]:
        if e.gradient:
            yield Event(ActionKind.BACKWARD_INPUT, m, e.target)


class StuckRank(NamedTuple):
    """A rank that cannot continue: its next action, and an event that this action waits for."""

    rank: int
    action: Action
    waits_for: Event


class Walk:
    """One pass over the rows; iteration yields every action in a feasible order."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.places = [0] * schedule.ranks
        self._happened: set[Event] = set()
        self._waiting: dict[Event, list[int]] = {}

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        ready = deque(range(self.schedule.ranks))
        while ready:
            rank = ready.popleft()
            while (action := self._next(rank)) is not None:
                if (lacking := self._lacking(action)) is not None:
                    self._waiting.setdefault(lacking, []).append(rank)
                    break
                yield rank, action
                self.places[rank] += 1
                for event in events_of(action):
                    self._happened.add(event)
                    ready.extend(self._waiting.pop(event, ()))

    def stuck(self) -> tuple[StuckRank, ...]:
        """Return the ranks that did not reach the end of their rows; call it after iteration."""
        found: list[StuckRank] = []
        for rank in range(self.schedule.ranks):
            action = self._next(rank)
            lacking = None if action is None else self._lacking(action)
            if action is not None and lacking is not None:
                found.append(StuckRank(rank, action, lacking))
        return tuple(found)

    def _next(self, rank: int) -> Action | None:
        row, place = self.schedule.rows[rank], self.places[rank]
        return row[place] if place < len(row) else None

    def _lacking(self, action: Action) -> Event | None:
        """Return an event that `action` needs and that has not happened."""
        needed = (event for atom in action.atoms for event in needs(self.schedule, atom))
        return next((event for event in needed if event not in self._happened), None)


def feasible_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield every (rank, action) in a feasible order. Raises ScheduleError if ranks deadlock, naming their actions."""
    walk = Walk(schedule)
    yield from walk
    if stuck := walk.stuck():
        raise ScheduleError(
            f"schedule {schedule.name!r}",
            "; ".join(f"rank {s.rank} is at {s.action} and waits for {Action(*s.waits_for)}" for s in stuck),
            "no rank can continue",
            "put each action after the actions that it needs",
        )
