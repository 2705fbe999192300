"""Collectives and messages between devices of one process, in virtual time.

A call is queued on a stream of its rank and returns at once. It moves data when something waits for that stream: the
first rank whose stream reaches a collective runs the streams of the other members up to it, and moves the data of all.
The collective starts when the last member is ready, and ends `latency + bytes / bandwidth` later on all of them, where
`bytes` are those of the rank that receives most.

Ranks are threads of which one runs at a time, as in `meshwright.simulate`. A rank that needs a call which another rank
has not made yet lets the other ranks run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.comm.communicators.call import CommCall, received_bytes

from .backend import register

Move = Callable[[Mapping[int, CommCall], Mapping[int, Sequence[Tensor]]], Mapping[int, Sequence[Tensor]]]
"""From the calls and the sent tensors of every rank to the received tensors of every rank; all on the CPU."""


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
    """The call of one rank: its stream, the position of the call in it, the time of the launch, and its operands."""

    stream: torch.Stream
    position: int
    issued: float
    sends: list[Any]
    receives: list[Any]
    call: CommCall | None
    """The call, if it is a collective."""


@dataclass(slots=True)
class _Transfer:
    """One collective or message, from the first call of a rank to the last."""

    name: str
    members: tuple[int, ...]
    seconds: float = 0.0
    parts: dict[int, _Part] = field(default_factory=dict)
    started: dict[int, float] = field(default_factory=dict)
    """Ranks whose streams have reached the call, with the virtual time."""
    runner: int | None = None
    """Rank that moves the data of all members of a collective."""
    sent: Sequence[Tensor] = ()
    """Values of a message that has left."""
    end: float | None = None


class Transport:
    """The links between the ranks of one process."""

    def __init__(self, latency: float, bandwidth: float, ranks: Ranks) -> None:
        self.latency, self.bandwidth = latency, bandwidth
        self._core = register()
        self._ranks = ranks
        self._transfers: dict[tuple[object, int], _Transfer] = {}
        self._counts: dict[tuple[int, object], int] = {}
        self._inside: dict[int, int] = {}
        """Rank whose stream is inside a collective → the thread that runs the stream."""

    def seconds(self, nbytes: float) -> float:
        """Return the virtual duration of a call in which a rank receives `nbytes`."""
        return self.latency + nbytes / self.bandwidth

    def collective(
        self,
        call: CommCall,
        rank: int,
        stream: torch.Stream,
        sends: Sequence[Tensor],
        receives: Sequence[Tensor],
        move: Move,
    ) -> None:
        """Queue the call of `rank` in a collective, which will overwrite `receives`.

        The n-th call of each member with the same members is one collective.
        """
        members = tuple(sorted(call.group))
        reads, writes = self._operands(sends), self._operands(receives)

        def queue() -> None:
            transfer = self._transfer(rank, members, call.kind, members, received_bytes(call, rank))
            run = partial(self._end_of, transfer, rank, move)
            self._queue(transfer, rank, stream, reads, writes, run, call)

        self._now_or_in_replays(queue)

    def send(self, rank: int, peer: int, tag: int, stream: torch.Stream, x: Tensor) -> None:
        """Queue a message; it leaves when the stream reaches it, whether or not the peer receives it."""
        reads, nbytes = self._operands([x]), x.nbytes

        def leave(transfer: _Transfer, start: float) -> float:
            transfer.started[rank] = start
            transfer.end = start + transfer.seconds
            transfer.sent = [operand.read() for operand in reads]
            return start + nbytes / self.bandwidth

        def queue() -> None:
            transfer = self._message(rank, rank, peer, tag, nbytes)
            self._queue(transfer, rank, stream, reads, [], partial(leave, transfer))

        self._now_or_in_replays(queue)

    def receive(self, rank: int, peer: int, tag: int, stream: torch.Stream, out: Tensor) -> None:
        """Queue the receive of a message into `out`."""
        writes, nbytes = self._operands([out]), out.nbytes

        def arrive(transfer: _Transfer, start: float) -> float:
            self._run_before(transfer, peer, more=1)
            assert transfer.end is not None
            (values,) = transfer.sent
            writes[0].write(values)
            return max(start, transfer.end)

        def queue() -> None:
            transfer = self._message(rank, peer, rank, tag, nbytes)
            self._queue(transfer, rank, stream, [], writes, partial(arrive, transfer))

        self._now_or_in_replays(queue)

    def _operands(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [self._core.Operand(x) for x in tensors]

    def _now_or_in_replays(self, queue: Callable[[], None]) -> None:
        """Queue a call; while a graph is recorded, only in each replay of it."""
        if not self._core.record(queue):
            queue()

    def _message(self, rank: int, source: int, target: int, tag: int, nbytes: int) -> _Transfer:
        return self._transfer(rank, ("message", source, target, tag), "message", (source, target), nbytes)

    def _transfer(self, rank: int, key: object, name: str, members: tuple[int, ...], nbytes: float) -> _Transfer:
        """Return the transfer of the next call of `rank` with this key, in which the rank receives `nbytes`."""
        count = self._counts[rank, key] = self._counts.get((rank, key), -1) + 1
        found = self._transfers.setdefault((key, count), _Transfer(name, members))
        found.seconds = max(found.seconds, self.seconds(nbytes))
        if len(found.parts) == len(found.members) - 1:
            del self._transfers[key, count]
        return found

    def _queue(
        self,
        transfer: _Transfer,
        rank: int,
        stream: torch.Stream,
        reads: list[Any],
        writes: list[Any],
        run: Callable[[float], float],
        call: CommCall | None = None,
    ) -> None:
        core = self._core
        transfer.parts[rank] = _Part(stream, core.position(stream) + 1, core.host_time(), reads, writes, call)
        core.launch(stream, transfer.name, reads, writes, run)
        self._ranks.release_all()

    def _end_of(self, transfer: _Transfer, rank: int, move: Move, start: float) -> float:
        """Return the end of a collective, after this rank has moved the data or has waited for the rank that does."""
        transfer.started.setdefault(rank, start)
        if transfer.end is not None:
            return transfer.end
        self._inside[rank] = threading.get_ident()
        try:
            if transfer.runner is None:
                self._run(transfer, rank, move)
            while transfer.end is None:
                self._ranks.wait(transfer.name, transfer.members)
        finally:
            del self._inside[rank]
            self._ranks.release_all()
        return transfer.end

    def _run(self, transfer: _Transfer, rank: int, move: Move) -> None:
        transfer.runner = rank
        for member in transfer.members:
            self._run_before(transfer, member, more=0)
        parts = transfer.parts
        calls = {r: part.call for r, part in parts.items() if part.call is not None}
        moved = move(calls, {r: [operand.read() for operand in part.sends] for r, part in parts.items()})
        for member, values in moved.items():
            for operand, x in zip(parts[member].receives, values, strict=True):
                operand.write(x)
        transfer.end = max(transfer.started.values()) + transfer.seconds

    def _run_before(self, transfer: _Transfer, member: int, more: int) -> None:
        """Run what `member` has queued before its call, and the call itself if `more` is 1."""
        while member not in transfer.started and self._is_waited_for(transfer, member, more):
            if self._inside.get(member) == threading.get_ident():
                raise RuntimeError(
                    f"{transfer.name} of ranks {transfer.members}: the stream of rank {member} waits in another call "
                    "for this one; fix: queue the calls in the same order on all ranks"
                )
            self._ranks.wait(transfer.name, transfer.members)
        if member in transfer.started:
            return
        part = transfer.parts[member]
        self._core.run_to(part.stream, part.position - 1 + more)
        if not more:
            transfer.started.setdefault(member, max(part.issued, self._core.stream_time(part.stream)))

    def _is_waited_for(self, transfer: _Transfer, member: int, more: int) -> bool:
        """True until `member` has made the call and no collective keeps its streams, except for that of a message.

        The copy that a message sends is complete, so the message leaves also while a collective waits for other ranks.
        """
        if member not in transfer.parts:
            return True
        return member in self._inside and not more
