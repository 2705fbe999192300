"""Tables with their messages added, and tables without the split of the backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .action import Action, ActionKind
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
    for atom in action.atoms:
        kind = ActionKind.RECEIVE_FORWARD if atom.kind is ActionKind.FORWARD else ActionKind.RECEIVE_BACKWARD
        sources, _ = _partners(schedule, atom)
        for source in sources:
            if schedule.rank_of(atom.microbatch, source) != rank:
                yield _message(kind, atom.microbatch, source, atom.chunk)


def _sent(schedule: Schedule, rank: int, action: Action) -> Iterator[Action]:
    for atom in action.atoms:
        kind = ActionKind.SEND_FORWARD if atom.kind is ActionKind.FORWARD else ActionKind.SEND_BACKWARD
        _, targets = _partners(schedule, atom)
        for target in targets:
            if schedule.rank_of(atom.microbatch, target) != rank:
                yield _message(kind, atom.microbatch, atom.chunk, target)


def _partners(schedule: Schedule, atom: Action) -> tuple[list[int], list[int]]:
    """Return the chunks whose values or gradients an action reads, and the chunks that read those it computes."""
    into, out_of = schedule.into, schedule.out_of
    if atom.kind is ActionKind.FORWARD:
        return [edge.source for edge in into[atom.chunk]], [edge.target for edge in out_of[atom.chunk]]
    if atom.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
        sources = [edge.target for edge in out_of[atom.chunk] if edge.gradient]
        return sources, [edge.source for edge in into[atom.chunk] if edge.gradient]
    return [], []


def _message(kind: ActionKind, microbatch: int, source: int, target: int) -> Action:
    """Return the action of a message, which names the chunk at its other end only if that is no neighbour."""
    message = Action(kind, microbatch, source)
    return message if message.other_end == target else message._replace(to=target)


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
