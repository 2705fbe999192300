"""The interface of all communicators, with the checks and counters that they share.

A public method checks its arguments, turns them into a `CommCall` and counts it. The communicator implements a method
of the same name with an underscore, which is called only for groups of two or more ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from meshwright.layout import Cache, ProcessMesh, Spec
from meshwright.reshard import ConversionPlan, execute

from .._errors import CallError, DeadlockError, wrong_message_error
from ..streams.stream_times import StreamTimes
from .argument_checks import check_length, one_dtype, shapes_of, wrong_shape
from .call import CommCall, Group, Message, Shape, message_call, received_bytes, send_for
from .counters import Counters
from .reductions import check_reduction, reduce_terms
from .stragglers import Straggler

Receive = tuple[int, Sequence[int], torch.dtype, torch.device]
"""A message that `exchange` expects: the peer's global rank, the shape, the dtype, and the device of the result."""

TAGS = 2**31
"""Exclusive upper bound on tags."""


@lru_cache(maxsize=4096)
def _reduction(op: str, dtype: torch.dtype, shape: Shape, group: Group) -> tuple[CommCall, int]:
    """Return the checked call of an all-reduce, and the bytes that each rank receives."""
    check_reduction(op, dtype)
    shapes = (tuple(shape),)
    call = CommCall("all_reduce", op, dtype, shapes, shapes, group)
    return call, received_bytes(call, group[0])


class PendingConversion(Protocol):
    """A conversion in flight."""

    def wait(self) -> Tensor:
        """Wait for the conversion; return this rank's part."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedConversion:
    """A finished conversion."""

    part: Tensor

    def wait(self) -> Tensor:
        return self.part


class Communicator(ABC):
    """Communicator of one rank.

    All methods take and return plain local tensors, with grad mode off. Outputs are fresh and contiguous. Inputs are
    never written to, unless the caller gives them up with `over`. Every rank of `group` makes the same call, with the
    same group in the same order.
    """

    kind: ClassVar[str]

    @property
    def replayed(self) -> frozenset[Literal["collectives", "messages"]]:
        """Return the kinds of calls that a device graph can hold, because the host has no part in them."""
        return frozenset()

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.seen = Counters()
        self._known_groups: set[Group] = set()
        self._reductions = Cache[tuple[str, torch.dtype, Shape, Group], tuple[CommCall, int]](1024)
        self._to_self: dict[int, deque[tuple[str, Tensor]]] = {}
        self.tickets: dict[int, PendingConversion] = {}
        """Conversions that a compiled program has started and not waited for, by numbers that are constants in it."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    def convert(self, way: ConversionPlan, x: Tensor) -> Tensor:
        """Return this rank's part after a conversion of its part `x`; `x` itself if the plan has no steps."""
        return execute(way, x, self)

    def start(self, way: ConversionPlan, x: Tensor) -> PendingConversion:
        """Begin a conversion; `wait()` of the result returns the part. `x` must not change until then.

        Ranks begin the same conversions in the same order. A communicator without background work converts before it
        returns.
        """
        return FinishedConversion(self.convert(way, x))

    def local_shape(self, spec: Spec) -> tuple[int, ...]:
        """Return the shape of the caller's part of a tensor with this spec."""
        return spec.local_shape(self.rank)

    def offset(self, spec: Spec, dim: int) -> int:
        """Return the first index along `dim` of the caller's part."""
        return spec.offset(self.rank, dim)

    def place(self, mesh: ProcessMesh, axes: Sequence[str]) -> int:
        """Return the index of the caller among the ranks along `axes`, the first axis outermost."""
        at, place = mesh.coordinate(self.rank), 0
        for axis in axes:
            place = place * mesh.sizes[axis] + at[axis]
        return place

    def all_reduce(self, x: Tensor, op: str, group: Group, over: bool = False, out: Tensor | None = None) -> Tensor:
        """Return the reduction of `x` over the group. `op` is sum, avg, max, min, prod, any or all.

        With `over` the caller gives up `x`: the result may share its memory. With `out`, the result is written there.
        """
        key = op, x.dtype, x.shape, group
        found = self._reductions.get(key)
        if found is None:
            self._check_group(group)
            found = self._reductions[key] = _reduction(*key)
        call, received = found
        if len(group) == 1:
            return _filled(out, reduce_terms((x,), op))
        with self.seen.note(call, received):
            if out is not None:
                return self._call_into(call, [x], [out])[0]
            return self._all_reduce_over(x, call) if over else self._all_reduce(x, call)

    def all_gather(
        self, x: Tensor, group: Group, shapes: Sequence[Sequence[int]], out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Return every rank's `x`, in the order of the group.

        `shapes[i]` is the shape of the tensor of `group[i]`; a shape may be empty. With `out`, the results are written
        there.

        Raises:
            CallError: `shapes` has another length than the group, or another shape for this rank than that of `x`.
        """
        self._check_group(group)
        expected = shapes_of(shapes)
        mine = tuple(x.shape)
        check_length("all_gather", expected, "shapes", group)
        if expected[group.index(self.rank)] != mine:
            raise wrong_shape("all_gather", f"shapes {expected}", f"rank {self.rank} has shape {mine}")
        if len(group) == 1:
            return _all_filled(out, [x])
        call = CommCall("all_gather", "", x.dtype, (mine,), expected, group)
        with self.seen.note(call, received_bytes(call, self.rank)):
            return self._all_gather(x, call) if out is None else self._call_into(call, [x], out)

    def reduce_scatter(self, pieces: Sequence[Tensor], op: str, group: Group, out: Tensor | None = None) -> Tensor:
        """Return the reduction of every rank's piece for the caller; `pieces[i]` goes to `group[i]`.

        With `out`, the result is written there.
        """
        self._check_group(group)
        check_length("reduce_scatter", pieces, "pieces", group)
        dtype = one_dtype("reduce_scatter", pieces)
        check_reduction(op, dtype)
        if len(group) == 1:
            return _filled(out, reduce_terms(pieces, op))
        sends = tuple(tuple(piece.shape) for piece in pieces)
        call = CommCall("reduce_scatter", op, dtype, sends, (sends[group.index(self.rank)],), group)
        with self.seen.note(call, received_bytes(call, self.rank)):
            return self._reduce_scatter(pieces, call) if out is None else self._call_into(call, pieces, [out])[0]

    def all_to_all(
        self,
        pieces: Sequence[Tensor],
        shapes: Sequence[Sequence[int]],
        group: Group,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Return every rank's piece for the caller; `pieces[i]` goes to `group[i]`, `shapes[i]` arrives from it.

        With `out`, the results are written there.

        Raises:
            CallError: there is not one piece and one shape for each rank, or the pieces differ in dtype.
        """
        self._check_group(group)
        expected = shapes_of(shapes)
        check_length("all_to_all", pieces, "pieces", group)
        check_length("all_to_all", expected, "shapes", group)
        dtype = one_dtype("all_to_all", pieces)
        sends = tuple(tuple(piece.shape) for piece in pieces)
        mine = group.index(self.rank)
        if sends[mine] != expected[mine]:
            raise wrong_shape("all_to_all", f"expects {expected[mine]} from itself", f"sends itself {sends[mine]}")
        if len(group) == 1:
            return _all_filled(out, pieces)
        call = CommCall("all_to_all", "", dtype, sends, expected, group)
        with self.seen.note(call, received_bytes(call, self.rank)):
            return self._all_to_all(pieces, call) if out is None else self._call_into(call, pieces, out)

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[Receive],
        group: Group,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Return the received tensors, in the order of `receives`; messages between two ranks keep their order.

        Peers are global ranks and may include the caller. Every rank of `group` makes the call, even without messages.
        With `out`, the results are written there.

        Raises:
            CallError: a peer is not in the group, or the caller expects other messages from itself than it sends.
        """
        self._check_group(group)
        sent = tuple((peer, tuple(x.shape), x.dtype) for peer, x in sends)
        expected = tuple((peer, tuple(shape), dtype) for peer, shape, dtype, _ in receives)
        self._check_peers({peer for peer, _, _ in sent + expected}, group)
        to_self, from_self = (self._with_itself(messages) for messages in (sent, expected))
        if to_self != from_self:
            raise wrong_shape("exchange", f"expects {from_self} from itself", f"sends itself {to_self}")
        call = CommCall("exchange", "", None, (), (), group, (sent, expected))
        if len(group) == 1:
            return _all_filled(out, [x for _, x in sends])
        with self.seen.note(call, received_bytes(call, self.rank)):
            if out is not None:
                return self._call_into(call, [x for _, x in sends], out)
            return self._exchange(sends, receives, call)

    def _with_itself(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages of this rank to itself."""
        return [message for message in messages if message[0] == self.rank]

    def send(self, x: Tensor, peer: int, tag: int) -> None:
        """Send a message to rank `peer`, where it is buffered until it is received; returns without waiting for that.

        `x` may be written to afterwards. Messages between two ranks with different tags may be received in any order.
        Messages with the same tag are received in the order in which they were sent. A message carries values only,
        without their autograd history.
        """
        x = x.detach()
        call = self._message("send", peer, tag, tuple(x.shape), x.dtype)
        with self.seen.note(call, 0):
            if peer == self.rank:
                self._to_self.setdefault(tag, deque()).append((str(call), contiguous_copy(x)))
            else:
                self._send(x, call)

    def receive(
        self, peer: int, tag: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Wait for the message with `tag` from rank `peer` and return it, in fresh memory.

        `shape` and `dtype` are those of the sent tensor.
        """
        call = self._message("receive", peer, tag, tuple(shape), dtype)
        device = torch.device(device)
        with self.seen.note(call, received_bytes(call, self.rank)):
            return self._from_self(call).to(device) if peer == self.rank else self._receive(call, device)

    def barrier(self, group: Group) -> None:
        """Return once every rank of the group has called it."""
        self._check_group(group)
        if len(group) == 1:
            return
        call = CommCall("barrier", "", None, (), (), group)
        with self.seen.note(call, received_bytes(call, self.rank)):
            self._barrier(call)

    def any_true(self, flag: bool, group: Group) -> bool:
        """True if `flag` is True on some rank of the group; every rank of the group makes the call."""
        return bool(self.all_reduce(torch.tensor([flag], device="cpu"), "any", group).item())

    def settle(self) -> None:  # noqa: B027 - nothing lags where ranks are simulated
        """Wait until all calls of this rank have been compared with those of its peers.

        Comparisons may lag behind the calls on devices.

        Raises:
            CommError: a peer has made another call, or none.
        """

    def comparing_first(self) -> AbstractContextManager[None]:
        """Return a context in which no comparison lags behind its call.

        It is for programs that write parameters before anyone can check for errors.
        """
        return nullcontext()

    def timing_streams(self) -> AbstractContextManager[StreamTimes | None]:
        """Return a context with the times of the work on this rank's communication streams; None if it has none."""
        return nullcontext()

    def has_ended(self, rank: int) -> bool:
        """True if the process of `rank` has ended. False on simulated ranks, and if only another host knows."""
        return False

    def stragglers(self) -> list[Straggler]:
        """Return the ranks that this rank waits for although they wait for nobody; always empty for simulated ranks."""
        return []

    def _call_into(self, call: CommCall, sends: Sequence[Tensor], out: Sequence[Tensor]) -> list[Tensor]:
        """Make a collective and return `out` with its results: by default, copies of the results in new memory."""
        return _all_filled(out, _MADE[call.kind](self, call, sends, out))

    @abstractmethod
    def _all_reduce(self, x: Tensor, call: CommCall) -> Tensor: ...

    def _all_reduce_over(self, x: Tensor, call: CommCall) -> Tensor:
        """Do the same as `_all_reduce`, possibly in the memory of `x`."""
        return self._all_reduce(x, call)

    @abstractmethod
    def _all_gather(self, x: Tensor, call: CommCall) -> list[Tensor]: ...

    @abstractmethod
    def _reduce_scatter(self, pieces: Sequence[Tensor], call: CommCall) -> Tensor: ...

    @abstractmethod
    def _all_to_all(self, pieces: Sequence[Tensor], call: CommCall) -> list[Tensor]: ...

    @abstractmethod
    def _exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Receive], call: CommCall
    ) -> list[Tensor]: ...

    @abstractmethod
    def _send(self, x: Tensor, call: CommCall) -> None: ...

    @abstractmethod
    def _receive(self, call: CommCall, device: torch.device) -> Tensor: ...

    @abstractmethod
    def _barrier(self, call: CommCall) -> None: ...

    def _message(self, kind: str, peer: int, tag: int, shape: Shape, dtype: torch.dtype) -> CommCall:
        asked = f"a {kind} of rank {self.rank}"
        if not 0 <= peer < self.size:
            write = f"use a rank from 0 to {self.size - 1}"
            raise CallError(asked, f"rank {peer} as its peer", f"there are {self.size} ranks", write)
        if not 0 <= tag < TAGS:
            raise CallError(asked, f"tag {tag}", f"tags are below {TAGS}", f"use a tag from 0 to {TAGS - 1}")
        return message_call(kind, self.rank, peer, tag, shape, dtype)

    def _from_self(self, call: CommCall) -> Tensor:
        waiting = self._to_self.get(call.tag)
        if waiting is None:
            raise DeadlockError(
                f"rank {self.rank}: {call}",
                f"rank {self.rank} has not sent itself this message",
                "a rank that waits for itself waits forever",
                f"call send(x, {self.rank}, {call.tag}) before the receive",
            )
        sent, x = waiting.popleft()
        if not waiting:
            del self._to_self[call.tag]
        check_message(call, self.rank, sent)
        return x

    def _check_group(self, group: Group) -> None:
        if group in self._known_groups:
            return
        write = f"use a tuple of distinct ranks below {self.size} that contains {self.rank}"
        asked = f"a collective of rank {self.rank}"
        if self.rank not in group:
            raise CallError(asked, f"the group {group}", "the caller is not in the group", write)
        if len(set(group)) != len(group):
            raise CallError(asked, f"the group {group}", "the group contains a rank twice", write)
        if min(group) < 0 or max(group) >= self.size:
            raise CallError(asked, f"the group {group}", f"the run has ranks 0 to {self.size - 1}", write)
        self._known_groups.add(group)

    def _check_peers(self, peers: set[int], group: Group) -> None:
        strangers = sorted(peers.difference(group))
        if strangers:
            raise CallError(
                f"an exchange of rank {self.rank} on ranks {group}",
                f"messages to or from ranks {strangers}",
                "every peer must be in the group, since all ranks of the group make the call",
                f"use the group {tuple(sorted({*group, *strangers}))}",
            )


def _exchanged(me: Communicator, call: CommCall, sends: Sequence[Tensor], out: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the results of an exchange in new memory, for the tensors that it sends and those for its results."""
    leaving, arriving = call.messages
    sent = [(peer, x) for (peer, _, _), x in zip(leaving, sends, strict=True)]
    receives = [(peer, shape, dtype, x.device) for (peer, shape, dtype), x in zip(arriving, out, strict=True)]
    return me._exchange(sent, receives, call)


_MADE: dict[str, Callable[[Communicator, CommCall, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]] = {
    "all_reduce": lambda me, call, sends, out: [me._all_reduce(sends[0], call)],
    "all_gather": lambda me, call, sends, out: me._all_gather(sends[0], call),
    "reduce_scatter": lambda me, call, sends, out: [me._reduce_scatter(sends, call)],
    "all_to_all": lambda me, call, sends, out: me._all_to_all(sends, call),
    "exchange": _exchanged,
}
"""Kind of a collective → its results in new memory."""


def _filled(out: Tensor | None, result: Tensor) -> Tensor:
    """Return the result, written to `out` if that is given."""
    return result if out is None else out.copy_(result)


def _all_filled(out: Sequence[Tensor] | None, results: Sequence[Tensor]) -> list[Tensor]:
    """Return the results, written to `out` or copied to new memory."""
    if out is None:
        return list(map(contiguous_copy, results))
    return [each.copy_(x) for each, x in zip(out, results, strict=True)]


def check_message(call: CommCall, rank: int, sent: str) -> None:
    """Raise DisagreementError if a message differs from the one that this receive of `rank` expects."""
    if sent != str(send_for(call, rank)):
        raise wrong_message_error(rank, str(call), call.message[0], sent)


def contiguous_copy(x: Tensor) -> Tensor:
    """Return the tensor in new memory, contiguous."""
    return x.clone(memory_format=torch.contiguous_format)
