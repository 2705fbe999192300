"""A collective or message of one rank as a value, and the comparison of two ranks' calls."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

Group = tuple[int, ...]
"""Global ranks in the order of the collective; the caller is one of them."""

Shape = tuple[int, ...]
Message = tuple[int, Shape, torch.dtype]
"""One point-to-point message: the peer's global rank, the shape and the dtype."""


class CommCall(NamedTuple):
    """One rank's side of one collective or message.

    `sends[i]` and `receives[i]` belong to `group[i]`; a reduction of one tensor has one entry in each. `messages` are
    the sends and the receives of an exchange, or the one message of a send or a receive. A send or receive has a `tag`
    too. Other kinds leave `messages` empty.

    >>> print(CommCall("all_reduce", "sum", torch.float32, ((2, 3),), ((2, 3),), (0, 1)))
    all_reduce(sum, float32, (2, 3)) on ranks 0, 1
    >>> print(message_call("receive", rank=0, peer=1, tag=5, shape=(2, 3), dtype=torch.float32))
    receive(float32, (2, 3), tag 5) from rank 1
    """

    kind: str
    op: str
    dtype: torch.dtype | None
    sends: tuple[Shape, ...]
    receives: tuple[Shape, ...]
    group: Group
    messages: tuple[tuple[Message, ...], tuple[Message, ...]] = ((), ())
    tag: int = 0

    @property
    def numel(self) -> int:
        """Return the number of elements that the caller contributes: its tensor, or all its pieces and messages."""
        return sum(map(_numel, self.sends)) + sum(_numel(shape) for _, shape, _ in self.messages[0])

    @property
    def message(self) -> Message:
        """Return the one message of a send or a receive."""
        (found,) = self.messages[0] + self.messages[1]
        return found

    def __str__(self) -> str:
        if self.kind in ("send", "receive"):
            peer, shape, dtype = self.message
            direction = "to" if self.kind == "send" else "from"
            return f"{self.kind}({_dtype_name(dtype)}, {shape}, tag {self.tag}) {direction} rank {peer}"
        return f"{self.kind}({', '.join(_arguments(self))}) on ranks {', '.join(map(str, self.group))}"


def message_call(kind: str, rank: int, peer: int, tag: int, shape: Shape, dtype: torch.dtype) -> CommCall:
    """Return the send or the receive of `rank`."""
    message = ((peer, shape, dtype),)
    group = (rank,) if peer == rank else (min(rank, peer), max(rank, peer))
    return CommCall(kind, "", None, (), (), group, (message, ()) if kind == "send" else ((), message), tag)


def send_for(call: CommCall, rank: int) -> CommCall:
    """Return the send of the other rank that matches a receive of `rank`."""
    peer, shape, dtype = call.message
    return message_call("send", peer, rank, call.tag, shape, dtype)


def received_bytes(call: CommCall, rank: int) -> int:
    """Return the bytes that `rank` must receive from other ranks, for the direct algorithm of any communicator.

    A reduction sends each rank the terms of the other ranks for its piece. An all-reduce is a reduce-scatter and an
    all-gather.
    """
    if call.kind in ("exchange", "send", "receive"):
        return sum(_numel(shape) * dtype.itemsize for peer, shape, dtype in call.messages[1] if peer != rank)
    if call.dtype is None:
        return 0
    others = len(call.group) - 1
    if call.kind == "all_reduce":
        return -(-2 * others * _numel(call.sends[0]) * call.dtype.itemsize // len(call.group))
    mine = call.group.index(rank)
    if call.kind == "reduce_scatter":
        return others * _numel(call.sends[mine]) * call.dtype.itemsize
    return (sum(map(_numel, call.receives)) - _numel(call.receives[mine])) * call.dtype.itemsize


def common_part(call: CommCall) -> tuple[object, ...]:
    """Return the part of a call that is equal on all ranks when their calls agree."""
    if call.kind == "all_gather":
        return (call.kind, call.dtype, call.receives, call.group)
    if call.kind in ("all_reduce", "reduce_scatter"):
        return (call.kind, call.op, call.dtype, call.sends, call.group)
    return (call.kind, call.dtype, call.group)


def is_pairwise(call: CommCall) -> bool:
    """True if two ranks' calls must also match piece by piece."""
    return call.kind in ("all_to_all", "exchange")


def call_mismatch(mine: CommCall, rank: int, other: CommCall, peer: int) -> str | None:
    """Return the reason why the calls of `rank` and `peer` cannot be one collective; None if they match."""
    ours, theirs = common_part(mine), common_part(other)
    if ours != theirs:
        return _difference(mine, other)
    if mine.kind == "all_to_all":
        return _piece_clash(mine, rank, other, peer) or _piece_clash(other, peer, mine, rank)
    if mine.kind == "exchange":
        return _message_clash(mine, rank, other, peer) or _message_clash(other, peer, mine, rank)
    return None


def expected_transfers(call: CommCall, rank: int) -> Counter[tuple[object, ...]]:
    """Return a count for each (source, target, ordinal, shape, dtype) of a pairwise call: +1 if sent, -1 if expected.

    The counts over all ranks of a group sum to zero if and only if the calls match.
    """
    found: Counter[tuple[object, ...]] = Counter()
    if call.kind == "all_to_all":
        for peer, sent, expected in zip(call.group, call.sends, call.receives, strict=True):
            found[(rank, peer, 0, sent, call.dtype)] += 1
            found[(peer, rank, 0, expected, call.dtype)] -= 1
        return found
    ordinals: Counter[tuple[int, int]] = Counter()
    for sign, messages in zip((1, -1), call.messages, strict=True):
        for peer, shape, dtype in messages:
            ends = (rank, peer) if sign > 0 else (peer, rank)
            ordinals[(sign, peer)] += 1
            found[(*ends, ordinals[(sign, peer)], shape, dtype)] += sign
    return found


def _numel(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _arguments(call: CommCall) -> list[str]:
    said = [call.op] if call.op else []
    if call.dtype is not None:
        said.append(_dtype_name(call.dtype))
    if call.kind == "all_reduce":
        said.append(str(call.sends[0]))
    elif call.kind in ("all_gather", "reduce_scatter"):
        said.append(_list(call.receives if call.kind == "all_gather" else call.sends))
    elif call.kind == "all_to_all":
        said += [f"sends {_list(call.sends)}", f"receives {_list(call.receives)}"]
    elif call.kind == "exchange":
        said += [f"{word} {_messages(part)}" for word, part in zip(("sends", "receives"), call.messages, strict=True)]
    return said


def _list(shapes: tuple[Shape, ...]) -> str:
    shown = ", ".join(map(str, shapes[:8]))
    return f"[{shown}, … {len(shapes)} in all]" if len(shapes) > 8 else f"[{shown}]"


def _messages(messages: tuple[Message, ...]) -> str:
    return "[" + ", ".join(f"{peer}: {_dtype_name(dtype)} {shape}" for peer, shape, dtype in messages) + "]"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _difference(a: CommCall, b: CommCall) -> str:
    if a.kind != b.kind:
        return "the ranks make different collectives"
    if a.group != b.group:
        return "the groups differ, or list the same ranks in different orders"
    if a.dtype != b.dtype:
        return "the dtypes differ"
    return "the reductions differ" if a.op != b.op else "the shapes differ"


def _piece_clash(sender: CommCall, rank: int, receiver: CommCall, peer: int) -> str | None:
    sent, expected = sender.sends[sender.group.index(peer)], receiver.receives[receiver.group.index(rank)]
    return None if sent == expected else f"rank {rank} sends {sent} and rank {peer} expects {expected}"


def _message_clash(sender: CommCall, rank: int, receiver: CommCall, peer: int) -> str | None:
    sent = [(shape, dtype) for to, shape, dtype in sender.messages[0] if to == peer]
    expected = [(shape, dtype) for source, shape, dtype in receiver.messages[1] if source == rank]
    if sent == expected:
        return None
    return f"rank {rank} sends {len(sent)} message(s) {sent} and rank {peer} expects {len(expected)}: {expected}"
