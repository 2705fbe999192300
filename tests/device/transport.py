"""Collectives and messages between devices of one process, in virtual time.

A call is queued on a stream of its rank and returns at once. It moves data when something waits for that stream: the
first rank whose stream reaches a collective runs the streams of the other members up to it, and carries it for all.
The collective starts when the last member is ready, and ends `latency + bytes / bandwidth` later on all of them.

Ranks are threads of which one runs at a time, as in `meshwright.simulate`. A rank that needs a call which another rank
has not made yet lets the other ranks run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from .backend import register

Move = Callable[[Mapping[int, Sequence[Tensor]]], Mapping[int, Sequence[Tensor]]]
"""From the sent tensors of every rank to the received tensors of every rank; all on the CPU."""


class Ranks(Protocol):
    """The threads of the ranks."""

    def wait(self, name: str, members: tuple[int, ...]) -> None:
        """Let other ranks run until `release_all`; the arguments name the call that this rank waits in."""
        ...

    def release_all(self) -> None:
        """Let the ranks that wait run again."""
        ...


@dataclass(slots=True)
class _Part:
    """What one rank brings to a meeting: its stream, the position of the call in it, and its operands."""

    stream: torch.Stream
    position: int
    issued: float
    sends: list[Any]
    receives: list[Any]


@dataclass(slots=True)
class _Meeting:
    """One collective or message, from its first call to the last."""

    name: str
    members: tuple[int, ...]
    seconds: float
    move: Move
    parts: dict[int, _Part] = field(default_factory=dict)
    started: dict[int, float] = field(default_factory=dict)
    """Ranks whose streams have reached the call, with the virtual time."""
    carrier: int | None = None
    end: float | None = None


class Transport:
    """The links between the ranks of one process."""

    def __init__(self, latency: float, bandwidth: float, ranks: Ranks) -> None:
        self.latency, self.bandwidth = latency, bandwidth
        self._core = register()
        self._ranks = ranks
        self._meetings: dict[tuple[object, int], _Meeting] = {}
        self._counts: dict[tuple[int, object], int] = {}
        self._inside: dict[int, int] = {}
        """Rank whose stream is inside a collective → the thread that runs the stream."""

    def seconds(self, nbytes: float) -> float:
        """Return the virtual duration of a call in which a rank receives `nbytes`."""
        return self.latency + nbytes / self.bandwidth

    def collective(
        self,
        name: str,
        rank: int,
        members: tuple[int, ...],
        stream: torch.Stream,
        sends: Sequence[Tensor],
        receives: Sequence[Tensor],
        move: Move,
        nbytes: float,
    ) -> None:
        """Queue the part of `rank` in a collective; `receives` are overwritten when it is carried out.

        The n-th call of each member with the same members is one collective.
        """
        meeting = self._meeting(rank, members, lambda: _Meeting(name, members, self.seconds(nbytes), move))
        self._queue(meeting, rank, stream, sends, receives, lambda start: self._meet(meeting, rank, start))

    def send(self, rank: int, peer: int, tag: int, stream: torch.Stream, x: Tensor) -> None:
        """Queue a message; it leaves when the stream reaches it, whether or not the peer receives it."""
        meeting = self._message(rank, rank, peer, tag, x.nbytes)

        def leave(start: float) -> float:
            meeting.started[rank] = start
            meeting.end = start + meeting.seconds
            meeting.parts[rank].receives = [operand.read() for operand in meeting.parts[rank].sends]
            return start + x.nbytes / self.bandwidth

        self._queue(meeting, rank, stream, [x], [], leave)

    def receive(self, rank: int, peer: int, tag: int, stream: torch.Stream, out: Tensor) -> None:
        """Queue the receive of a message into `out`."""
        meeting = self._message(rank, peer, rank, tag, out.nbytes)

        def arrive(start: float) -> float:
            self._run_before(meeting, peer, more=1)
            assert meeting.end is not None
            (values,) = meeting.parts[peer].receives
            meeting.parts[rank].receives[0].write(values)
            return max(start, meeting.end)

        self._queue(meeting, rank, stream, [], [out], arrive)

    def _message(self, rank: int, source: int, target: int, tag: int, nbytes: int) -> _Meeting:
        key = ("message", source, target, tag)
        members = (source, target)
        return self._meeting(rank, key, lambda: _Meeting("message", members, self.seconds(nbytes), lambda sent: sent))

    def _meeting(self, rank: int, key: object, make: Callable[[], _Meeting]) -> _Meeting:
        """Return the meeting of the next call of `rank` with this key."""
        count = self._counts[rank, key] = self._counts.get((rank, key), -1) + 1
        found = self._meetings.get((key, count))
        if found is None:
            found = self._meetings[key, count] = make()
        if len(found.parts) == len(found.members) - 1:
            del self._meetings[key, count]
        return found

    def _queue(
        self,
        meeting: _Meeting,
        rank: int,
        stream: torch.Stream,
        sends: Sequence[Tensor],
        receives: Sequence[Tensor],
        run: Callable[[float], float],
    ) -> None:
        core = self._core
        reads, writes = [core.Operand(x) for x in sends], [core.Operand(x) for x in receives]
        meeting.parts[rank] = _Part(stream, core.position(stream) + 1, core.host_time(), reads, writes)
        core.launch(stream, meeting.name, reads, writes, run)
        self._ranks.release_all()

    def _meet(self, meeting: _Meeting, rank: int, start: float) -> float:
        """Carry the collective, or wait for the rank that carries it; return its end."""
        meeting.started.setdefault(rank, start)
        if meeting.end is not None:
            return meeting.end
        self._inside[rank] = threading.get_ident()
        try:
            if meeting.carrier is None:
                self._carry(meeting, rank)
            while meeting.end is None:
                self._ranks.wait(meeting.name, meeting.members)
        finally:
            del self._inside[rank]
            self._ranks.release_all()
        return meeting.end

    def _carry(self, meeting: _Meeting, rank: int) -> None:
        meeting.carrier = rank
        for member in meeting.members:
            self._run_before(meeting, member, more=0)
        parts = meeting.parts
        moved = meeting.move({r: [operand.read() for operand in part.sends] for r, part in parts.items()})
        for member, values in moved.items():
            for operand, x in zip(parts[member].receives, values, strict=True):
                operand.write(x)
        meeting.end = max(meeting.started.values()) + meeting.seconds

    def _run_before(self, meeting: _Meeting, member: int, more: int) -> None:
        """Run what `member` has queued before its call, and the call itself if `more` is 1."""
        while member not in meeting.started and (member not in meeting.parts or member in self._inside):
            if self._inside.get(member) == threading.get_ident():
                raise RuntimeError(
                    f"{meeting.name} of ranks {meeting.members}: the stream of rank {member} waits in another call for "
                    "this one; fix: queue the calls in the same order on all ranks"
                )
            self._ranks.wait(meeting.name, meeting.members)
        if member in meeting.started:
            return
        part = meeting.parts[member]
        self._core.run_to(part.stream, part.position - 1 + more)
        if not more:
            meeting.started.setdefault(member, max(part.issued, self._core.stream_time(part.stream)))
