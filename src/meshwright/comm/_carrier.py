"""One interface for carrying a step out; the laws that hold for every carrier live here, once.

A public method checks its arguments, turns them into a `Call`, counts it, and leaves the carrying to a
method of the same name with an underscore, which only ever sees groups of two or more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from meshwright.layout import ProcessMesh, Spec
from meshwright.reshard import Plan, execute

from ._call import Call, Group, Shape, message_call, received_bytes, send_for
from ._counters import Counters
from ._errors import CallError, DeadlockError, wrong_message
from ._reduce import check_reduction, reduce
from ._stragglers import Straggler

Receive = tuple[int, Sequence[int], torch.dtype, torch.device]
"""What `exchange` expects: the peer's global rank, the shape, the dtype, the device to put it on."""

TAGS = 2**31
"""Tags are the numbers below."""


@lru_cache(maxsize=4096)
def _reduction(op: str, dtype: torch.dtype, shape: Shape, group: Group) -> tuple[Call, int]:
    """The all-reduce of a tensor, and what each rank receives; checked and counted once."""
    check_reduction(op, dtype)
    shapes = (tuple(shape),)
    call = Call("all_reduce", op, dtype, shapes, shapes, group)
    return call, received_bytes(call, group[0])


class Arrival(Protocol):
    """A conversion under way."""

    def wait(self) -> Tensor:
        """This rank's part, once it is there."""
        ...


@dataclass(frozen=True, slots=True)
class Arrived:
    """A conversion that is done."""

    part: Tensor

    def wait(self) -> Tensor:
        return self.part


class Carrier(ABC):
    """One rank's way to the others.

    All methods take and return plain local tensors, with grad mode off. Outputs are fresh and contiguous; inputs are
    never written, unless the caller lets go of them. Every rank of `group` makes the same call, with the same group in
    the same order.
    """

    kind: ClassVar[str]

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.seen = Counters()
        self._known_groups: set[Group] = set()
        self._to_self: dict[int, deque[tuple[str, Tensor]]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    def convert(self, way: Plan, x: Tensor) -> Tensor:
        """This rank's part after a conversion, from its part `x`; `x` itself when the plan has no work."""
        return execute(way, x, self)

    def start(self, way: Plan, x: Tensor) -> Arrival:
        """A conversion that is begun: `wait()` gives the part. `x` stays as it is until then.

        Ranks begin the same conversions in the same order. A carrier that cannot work on the side has done it by then.
        """
        return Arrived(self.convert(way, x))

    def local_shape(self, spec: Spec) -> tuple[int, ...]:
        """Shape of what the caller holds of a tensor that lies as `spec` says."""
        return spec.local_shape(self.rank)

    def offset(self, spec: Spec, dim: int) -> int:
        """First index along `dim` that the caller holds."""
        return spec.offset(self.rank, dim)

    def place(self, mesh: ProcessMesh, axes: Sequence[str]) -> int:
        """Number of the caller among the ranks along `axes`, the first axis outermost."""
        at, place = mesh.coordinate(self.rank), 0
        for axis in axes:
            place = place * mesh.sizes[axis] + at[axis]
        return place

    def all_reduce(self, x: Tensor, op: str, group: Group, over: bool = False) -> Tensor:
        """The reduction of every rank's `x`, on every rank. `op` is sum, avg, max, min, prod, any or all.

        With `over` the caller needs `x` no more: the result may lie in its memory.
        """
        self._check_group(group)
        call, received = _reduction(op, x.dtype, x.shape, group)
        if len(group) == 1:
            return reduce((x,), op)
        with self.seen.note(call, received):
            return self._all_reduce_over(x, call) if over else self._all_reduce(x, call)

    def all_gather(self, x: Tensor, group: Group, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Every rank's `x`, in the order of the group; `shapes[i]` is the shape of `group[i]`'s, and may be empty."""
        self._check_group(group)
        expected = _shapes(shapes)
        mine = tuple(x.shape)
        _check_length("all_gather", expected, "shapes", group)
        if expected[group.index(self.rank)] != mine:
            raise _wrong_shape("all_gather", f"shapes {expected}", f"rank {self.rank} brings {mine}")
        if len(group) == 1:
            return [_copy(x)]
        call = Call("all_gather", "", x.dtype, (mine,), expected, group)
        with self.seen.note(call, received_bytes(call, self.rank)):
            return self._all_gather(x, call)

    def reduce_scatter(self, pieces: Sequence[Tensor], op: str, group: Group) -> Tensor:
        """The reduction of every rank's piece for the caller; `pieces[i]` goes to `group[i]`."""
        self._check_group(group)
        _check_length("reduce_scatter", pieces, "pieces", group)
        dtype = _one_dtype("reduce_scatter", pieces)
        check_reduction(op, dtype)
        if len(group) == 1:
            return reduce(pieces, op)
        sends = tuple(tuple(piece.shape) for piece in pieces)
        call = Call("reduce_scatter", op, dtype, sends, (sends[group.index(self.rank)],), group)
        with self.seen.note(call, received_bytes(call, self.rank)):
            return self._reduce_scatter(pieces, call)

    def all_to_all(self, pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: Group) -> list[Tensor]:
        """What every rank has for the caller; `pieces[i]` goes to `group[i]`, `shapes[i]` arrives from it."""
        self._check_group(group)
        expected = _shapes(shapes)
        _check_length("all_to_all", pieces, "pieces", group)
        _check_length("all_to_all", expected, "shapes", group)
        dtype = _one_dtype("all_to_all", pieces)
        sends = tuple(tuple(piece.shape) for piece in pieces)
        mine = group.index(self.rank)
        if sends[mine] != expected[mine]:
            raise _wrong_shape("all_to_all", f"{expected[mine]} from itself", f"a piece of {sends[mine]} for itself")
        if len(group) == 1:
            return [_copy(pieces[0])]
        call = Call("all_to_all", "", dtype, sends, expected, group)
        with self.seen.note(call, received_bytes(call, self.rank)):
            return self._all_to_all(pieces, call)

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Receive], group: Group) -> list[Tensor]:
        """What arrives, in the order of `receives`; messages between two ranks keep their order.

        Peers are global ranks, the caller itself among them; every rank of `group` calls it, also with nothing to do.
        """
        self._check_group(group)
        sent = tuple((peer, tuple(x.shape), x.dtype) for peer, x in sends)
        expected = tuple((peer, tuple(shape), dtype) for peer, shape, dtype, _ in receives)
        self._check_peers({peer for peer, _, _ in sent + expected}, group)
        to_self = [message for message in sent if message[0] == self.rank]
        from_self = [message for message in expected if message[0] == self.rank]
        if to_self != from_self:
            raise _wrong_shape("exchange", f"{from_self} from itself", f"{to_self} sent to itself")
        call = Call("exchange", "", None, (), (), group, (sent, expected))
        if len(group) == 1:
            return [_copy(x) for _, x in sends]
        with self.seen.note(call, received_bytes(call, self.rank)):
            return self._exchange(sends, receives, call)

    def send(self, x: Tensor, peer: int, tag: int) -> None:
        """Gives rank `peer` a message that waits there until it is received; returns without waiting for that.

        `x` may be written to afterwards. Between two ranks, messages with different tags may be received in any order;
        those with the same tag are received in the order in which they were sent. A message carries values alone,
        without their history.
        """
        x = x.detach()
        call = self._message("send", peer, tag, tuple(x.shape), x.dtype)
        with self.seen.note(call, 0):
            if peer == self.rank:
                self._to_self.setdefault(tag, deque()).append((str(call), _copy(x)))
            else:
                self._send(x, call)

    def receive(
        self, peer: int, tag: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """The message with `tag` that rank `peer` has sent, or will send: waits until it is there.

        It comes in fresh memory. `shape` and `dtype` are those of what is sent.
        """
        call = self._message("receive", peer, tag, tuple(shape), dtype)
        device = torch.device(device)
        with self.seen.note(call, received_bytes(call, self.rank)):
            return self._from_self(call).to(device) if peer == self.rank else self._receive(call, device)

    def barrier(self, group: Group) -> None:
        """Returns once every rank of the group has called it."""
        self._check_group(group)
        if len(group) == 1:
            return
        call = Call("barrier", "", None, (), (), group)
        with self.seen.note(call, received_bytes(call, self.rank)):
            self._barrier(call)

    def settle(self) -> None:  # noqa: B027 - nothing lags where ranks are simulated
        """Return once all calls of this rank were compared with those of its peers, which may lag behind on devices.

        Raises:
            CommError: a peer has made another call, or none.
        """

    def comparing_first(self) -> AbstractContextManager[None]:
        """Inside, no comparison lags behind its call: for programs that write parameters before anyone can look."""
        return nullcontext()

    def stragglers(self) -> list[Straggler]:
        """Return the ranks that this one waits for, though they wait for nobody; none where ranks are simulated."""
        return []

    @abstractmethod
    def _all_reduce(self, x: Tensor, call: Call) -> Tensor: ...

    def _all_reduce_over(self, x: Tensor, call: Call) -> Tensor:
        """As `_all_reduce`, perhaps in the memory of `x`."""
        return self._all_reduce(x, call)

    @abstractmethod
    def _all_gather(self, x: Tensor, call: Call) -> list[Tensor]: ...

    @abstractmethod
    def _reduce_scatter(self, pieces: Sequence[Tensor], call: Call) -> Tensor: ...

    @abstractmethod
    def _all_to_all(self, pieces: Sequence[Tensor], call: Call) -> list[Tensor]: ...

    @abstractmethod
    def _exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Receive], call: Call
    ) -> list[Tensor]: ...

    @abstractmethod
    def _send(self, x: Tensor, call: Call) -> None: ...

    @abstractmethod
    def _receive(self, call: Call, device: torch.device) -> Tensor: ...

    @abstractmethod
    def _barrier(self, call: Call) -> None: ...

    def _message(self, kind: str, peer: int, tag: int, shape: Shape, dtype: torch.dtype) -> Call:
        asked = f"a {kind} of rank {self.rank}"
        if not 0 <= peer < self.size:
            write = f"a rank from 0 to {self.size - 1}"
            raise CallError(asked, f"rank {peer} as its peer", f"there are {self.size} ranks", write)
        if not 0 <= tag < TAGS:
            raise CallError(asked, f"tag {tag}", "tags are numbers of 31 bits", f"a tag from 0 to {TAGS - 1}")
        return message_call(kind, self.rank, peer, tag, shape, dtype)

    def _from_self(self, call: Call) -> Tensor:
        waiting = self._to_self.get(call.tag)
        if waiting is None:
            raise DeadlockError(
                f"rank {self.rank}: {call}",
                f"rank {self.rank} has sent itself no such message",
                "a rank that waits for itself waits for ever",
                f"send(x, {self.rank}, {call.tag}) before the receive",
            )
        sent, x = waiting.popleft()
        if not waiting:
            del self._to_self[call.tag]
        check_message(call, self.rank, sent)
        return x

    def _check_group(self, group: Group) -> None:
        if group in self._known_groups:
            return
        write = f"a tuple of distinct ranks below {self.size} with {self.rank} among them"
        asked = f"a collective of rank {self.rank}"
        if self.rank not in group:
            raise CallError(asked, f"the group {group}", "the caller is not in the group", write)
        if len(set(group)) != len(group):
            raise CallError(asked, f"the group {group}", "a rank is in the group twice", write)
        if min(group) < 0 or max(group) >= self.size:
            raise CallError(asked, f"the group {group}", f"there are only the ranks 0 to {self.size - 1}", write)
        self._known_groups.add(group)

    def _check_peers(self, peers: set[int], group: Group) -> None:
        strangers = sorted(peers.difference(group))
        if strangers:
            raise CallError(
                f"an exchange of rank {self.rank} on ranks {group}",
                f"messages to or from ranks {strangers}",
                "a peer must be in the group, since all of the group makes the call",
                f"the group {tuple(sorted({*group, *strangers}))}",
            )


def check_message(call: Call, rank: int, sent: str) -> None:
    """Refuse, for a receive of `rank`, a message of which its sender says something else."""
    if sent != str(send_for(call, rank)):
        raise wrong_message(rank, str(call), call.message[0], sent)


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _shapes(shapes: Sequence[Sequence[int]]) -> tuple[Shape, ...]:
    return tuple([tuple(shape) for shape in shapes])


def _check_length(kind: str, found: Sequence[object], word: str, group: Group) -> None:
    if len(found) != len(group):
        raise CallError(
            f"{kind} on {len(group)} ranks",
            f"{len(found)} {word}",
            f"each rank has one of the {word}",
            f"{word}[i] for group[i]",
        )


def _one_dtype(kind: str, pieces: Sequence[Tensor]) -> torch.dtype:
    dtype = pieces[0].dtype
    for piece in pieces:
        if piece.dtype != dtype:
            raise CallError(kind, f"pieces of {dtype} and {piece.dtype}", "a call has one dtype", "piece.to(dtype)")
    return dtype


def _wrong_shape(kind: str, asked: str, found: str) -> CallError:
    return CallError(f"{kind}: {asked}", found, "the two must be equal", "shapes taken from the layout of the tensor")
