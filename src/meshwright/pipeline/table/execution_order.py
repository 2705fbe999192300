"""Execution order of a table: a feasible order of all actions, or the actions at which ranks deadlock.

Messages follow the rules of a channel. Each action waits for named events, or for the first message of its channel (a
Kahn network). So the set of completed actions does not depend on the order in which ranks are visited, and one walk
decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from .._errors import ScheduleError
from .action import NOTHING, RECEIVES, SENDS, TRANSFERS, Action, ActionKind
from .schedule import Schedule


class Channel(StrEnum):
    """Kind of channel for messages between two ranks."""

    BUFFERED = "buffered"
    """A send never waits; a receive finds its message by tag."""
    IN_ORDER = "in order"
    """A send never waits; messages from one rank to another are received in the order in which they were sent."""
    RENDEZVOUS = "rendezvous"
    """A send waits for its receive; messages that run side by side (`&`) are posted together."""


class Event(NamedTuple):
    """An event in a table: a chunk's output, input gradient or weight gradient is computed, or a message passed."""

    kind: ActionKind
    microbatch: int
    chunk: int
    to: int = NOTHING


_GIVES = {
    ActionKind.FORWARD: (ActionKind.FORWARD,),
    ActionKind.BACKWARD: (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT),
    ActionKind.BACKWARD_INPUT: (ActionKind.BACKWARD_INPUT,),
    ActionKind.BACKWARD_WEIGHT: (ActionKind.BACKWARD_WEIGHT,),
    ActionKind.RECOMPUTE: (ActionKind.RECOMPUTE,),
}
_SENT = {ActionKind.RECEIVE_FORWARD: ActionKind.SEND_FORWARD, ActionKind.RECEIVE_BACKWARD: ActionKind.SEND_BACKWARD}
_BEHIND = {
    ActionKind.RECOMPUTE: ActionKind.FORWARD,
    ActionKind.BACKWARD_WEIGHT: ActionKind.BACKWARD_INPUT,
    ActionKind.SEND_FORWARD: ActionKind.FORWARD,
    ActionKind.SEND_BACKWARD: ActionKind.BACKWARD_INPUT,
}
"""Kinds that follow one other action of the same chunk and microbatch → the kind of that action."""


def events(action: Action) -> Iterator[Event]:
    """Yield the events that have happened when `action` (one atom) has ended."""
    if action.kind in TRANSFERS:
        yield Event(action.kind, action.microbatch, action.chunk, action.other_end)
    for kind in _GIVES.get(action.kind, ()):
        yield Event(kind, action.microbatch, action.chunk)


def events_of(action: Action) -> Iterator[Event]:
    """Yield the events that have happened when `action`, with the actions beside it, has ended."""
    for atom in action.atoms:
        yield from events(atom)


def needs(schedule: Schedule, action: Action) -> Iterator[Event]:
    """Yield the events that must happen before `action` (one atom) begins; for a receive, that its message was sent."""
    kind, m, c = action.kind, action.microbatch, action.chunk
    if kind is ActionKind.FORWARD:
        for e in schedule.into[c]:
            yield _arrival(schedule, ActionKind.RECEIVE_FORWARD, ActionKind.FORWARD, m, e.source, c)
    elif kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
        yield from _needs_of_backward(schedule, m, c)
    elif kind in _BEHIND:
        yield Event(_BEHIND[kind], m, c)
    elif kind in RECEIVES:
        yield Event(_SENT[kind], m, c, action.other_end)


def _needs_of_backward(schedule: Schedule, m: int, c: int) -> Iterator[Event]:
    yield Event(ActionKind.RECOMPUTE if (m, c) in schedule.recomputed else ActionKind.FORWARD, m, c)
    for e in schedule.out_of[c]:
        if e.gradient:
            yield _arrival(schedule, ActionKind.RECEIVE_BACKWARD, ActionKind.BACKWARD_INPUT, m, e.target, c)


def _arrival(schedule: Schedule, received: ActionKind, made: ActionKind, m: int, source: int, target: int) -> Event:
    """Return the event after which `target` may read the output of `source`: a receive, if the table has receives."""
    crosses = schedule.rank_of(m, source) != schedule.rank_of(m, target)
    return Event(received, m, source, target) if crosses and schedule.has_transfers else Event(made, m, source)


def message_ranks(schedule: Schedule, action: Action) -> tuple[int, int]:
    """Return the sending and the receiving rank of a message."""
    m = action.microbatch
    return schedule.rank_of(m, action.chunk), schedule.rank_of(m, action.other_end)


class StuckRank(NamedTuple):
    """A rank that cannot continue: its next action, and the events that this action waits for."""

    rank: int
    action: Action
    waits_for: str


class Walk:
    """One pass over the rows under the rules of `channel`; iteration yields every action in a feasible order."""

    def __init__(self, schedule: Schedule, channel: Channel = Channel.BUFFERED) -> None:
        self.schedule, self.channel = schedule, channel
        self.places = [0] * schedule.ranks
        self._happened: set[Event] = set()
        self._waiting: dict[Event, list[int]] = {}
        self._queues: dict[tuple[int, int], deque[Event]] = {}
        self._posted: dict[int, frozenset[Event]] = {}

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        ready = deque(range(self.schedule.ranks))
        while ready:
            rank = ready.popleft()
            row = self.schedule.rows[rank]
            while self.places[rank] < len(row) and self._begins(rank, row[self.places[rank]], ready):
                action = row[self.places[rank]]
                yield rank, action
                self.places[rank] += 1
                for event in events_of(action):
                    self._happened.add(event)
                    ready.extend(self._waiting.pop(event, ()))

    def stuck(self) -> tuple[StuckRank, ...]:
        """Return the ranks that did not reach the end of their rows; call it after iteration."""
        found: list[StuckRank] = []
        for rank, row in enumerate(self.schedule.rows):
            if self.places[rank] < len(row):
                action = row[self.places[rank]]
                found.append(StuckRank(rank, action, self._reason(rank, action)))
        return tuple(found)

    def _begins(self, rank: int, action: Action, ready: deque[int]) -> bool:
        """True if `action` can end now; otherwise the event that it lacks wakes the rank later."""
        if (lacking := self._lacking(action)) is not None:
            self._waiting.setdefault(lacking, []).append(rank)
            return False
        if self.channel is Channel.RENDEZVOUS:
            return self._meets(rank, action, ready)
        return self.channel is Channel.BUFFERED or self._takes_in_order(action)

    def _lacking(self, action: Action) -> Event | None:
        for atom in action.atoms:
            if self.channel is Channel.RENDEZVOUS and atom.kind in RECEIVES:
                continue
            for event in needs(self.schedule, atom):
                if event not in self._happened:
                    return event
        return None

    def _takes_in_order(self, action: Action) -> bool:
        """True if the receives of `action` match the first messages of their channels; sends are appended to theirs."""
        for atom in action.atoms:
            if atom.kind in SENDS:
                queue = self._queues.setdefault(message_ranks(self.schedule, atom), deque())
                queue.extend(events(atom))
        for atom in action.atoms:
            if atom.kind in RECEIVES:
                source, target = message_ranks(self.schedule, atom)
                queue = self._queues[source, target]
                if queue[0] != next(needs(self.schedule, atom)):
                    return False
                queue.popleft()
        return True

    def _meets(self, rank: int, action: Action, ready: deque[int]) -> bool:
        """True if the messages of `action` are complete: both their ranks have posted them."""
        messages = frozenset(e for atom in action.atoms if atom.kind in TRANSFERS for e in events(atom))
        for event in self._posted.setdefault(rank, messages):
            other, answer = self._peer(rank, event), _counterpart(event)
            if answer in self._posted.get(other, ()):
                self._posted[rank] -= {event}
                self._posted[other] -= {answer}
                if not self._posted[other]:
                    ready.append(other)
        if self._posted[rank]:
            return False
        del self._posted[rank]
        return True

    def _peer(self, rank: int, event: Event) -> int:
        """Return the other rank of a message; `rank` itself if the message does not leave it."""
        return next((r for r in message_ranks(self.schedule, _action(event)) if r != rank), rank)

    def _reason(self, rank: int, action: Action) -> str:
        if (lacking := self._lacking(action)) is not None:
            return _told(lacking)
        if self.channel is Channel.RENDEZVOUS:
            return " and ".join(_told(_counterpart(e)) for e in self._posted.get(rank, ()))
        first = next(a for a in action.atoms if a.kind in RECEIVES)
        head = self._queues[message_ranks(self.schedule, first)][0]
        return f"{_told(head)}, sent before it, to be received"


def _counterpart(event: Event) -> Event:
    kinds = {**_SENT, **{sent: received for received, sent in _SENT.items()}}
    return event._replace(kind=kinds[event.kind])


def _action(event: Event) -> Action:
    return Action(event.kind, event.microbatch, event.chunk, event.to)


def _told(event: Event) -> str:
    return str(_action(event)._replace(to=NOTHING))


def feasible_order(schedule: Schedule, channel: Channel = Channel.BUFFERED) -> Iterator[tuple[int, Action]]:
    """Yield every (rank, action) in a feasible order. Raises ScheduleError if ranks deadlock, naming their actions."""
    walk = Walk(schedule, channel)
    yield from walk
    if stuck := walk.stuck():
        raise ScheduleError(
            f"schedule {schedule.name!r} over {channel} channels",
            "; ".join(f"rank {s.rank} is at {s.action} and waits for {s.waits_for}" for s in stuck),
            "no rank can continue",
            "put each receive after its send, and sends in the order of the receives"
            if channel is not Channel.BUFFERED
            else "put each action after the actions that it needs",
        )
