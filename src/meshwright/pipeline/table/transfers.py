"""Tables with their messages added, and tables without the split of the backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .action import NOTHING, Action, ActionKind
from .schedule import Schedule


def with_transfers(schedule: Schedule) -> Schedule:
    """Return the same table with each send after the action that makes the message, and each receive before its use.

    >>> from meshwright.pipeline import gpipe
    >>> print(with_transfers(gpipe(2, 1)))
    GPipe: 1 microbatch
    way: 0 1
    0: F0.0 >F0.0 <B0.1 BW0.0
    1: <F0.0 F0.1 BW0.1 >B0.1
    """
    if schedule.has_transfers:
        return schedule
    rows = tuple(
        tuple(
            moved
            for action in row
            for moved in (*_received(schedule, rank, action), action, *_sent(schedule, rank, action))
        )
        for rank, row in enumerate(schedule.rows)
    )
    return replace(schedule, rows=rows)


def _received(schedule: Schedule, rank: int, action: Action) -> Iterator[Action]:
    for kind, m, c, *_ in action.atoms:
        if kind is ActionKind.FORWARD:
            for e in schedule.into[c]:
                if schedule.rank_of(m, e.source) != rank:
                    yield Action(ActionKind.RECEIVE_FORWARD, m, e.source, NOTHING if c == e.source + 1 else c)
        elif kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
            for e in schedule.out_of[c]:
                if e.gradient and schedule.rank_of(m, e.target) != rank:
                    yield Action(ActionKind.RECEIVE_BACKWARD, m, e.target, NOTHING if c == e.target - 1 else c)


def _sent(schedule: Schedule, rank: int, action: Action) -> Iterator[Action]:
    for kind, m, c, *_ in action.atoms:
        if kind is ActionKind.FORWARD:
            for e in schedule.out_of[c]:
                if schedule.rank_of(m, e.target) != rank:
                    yield Action(ActionKind.SEND_FORWARD, m, c, NOTHING if e.target == c + 1 else e.target)
        elif kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
            for e in schedule.into[c]:
                if e.gradient and schedule.rank_of(m, e.source) != rank:
                    yield Action(ActionKind.SEND_BACKWARD, m, c, NOTHING if e.source == c - 1 else e.source)


def whole_backward(schedule: Schedule, name: str | None = None) -> Schedule:
    """Return the same order with each B as BW and no W, for a runtime that cannot split the backward."""

    def merged(action: Action) -> Iterator[Action]:
        atoms = [a for a in action.atoms if a.kind is not ActionKind.BACKWARD_WEIGHT]
        atoms = [a._replace(kind=ActionKind.BACKWARD) if a.kind is ActionKind.BACKWARD_INPUT else a for a in atoms]
        beside: Action | None = None
        for atom in reversed(atoms):
            beside = atom._replace(beside=beside)
        if beside is not None:
            yield beside

    rows = tuple(tuple(m for action in row for m in merged(action)) for row in schedule.rows)
    return replace(schedule, rows=rows, name=name or schedule.name)
