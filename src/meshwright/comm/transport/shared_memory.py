"""A transport between the processes of one host: each rank writes to its own slot, and reads the slots of the others.

All operations consist of rounds. In a round a rank writes to its slot, sets its flag to the number of the round, waits
for the flags of the others, and reads their slots. Each rank has two slots, used in turn. A rank that sets its flag for
the next round has read this one, so the slot of the round before is free.

Received data is combined in the order of the group, so every rank gets the same bits.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
from torch import Tensor

from meshwright.layout import PlacedMessage

from ..communicators.reductions import reduce_into
from ..torch_hooks import PrefixStore, Store
from .shared_region import attach_region, create_region, host_identity, is_running, unlink_region, wait_for

SLOT = 2**20
"""Bytes that a rank writes in one round."""
_LINE = 8
"""Numbers in a cache line; no two ranks write to the same line."""
_FLAG, _PROCESS, _WORDS = 0, 1, 2
"""Indices in a rank's line: its flag, its process number, and a word for each of two rounds."""
_BETWEEN_ASKS, _BETWEEN_LOOKS = 0.002, 0.25
"""Seconds between two reads of the store, and between two checks of a rank's process."""
_SHARED = 2**14
"""With more than two ranks, larger reductions (in bytes) are divided between the ranks."""


@dataclass(frozen=True, slots=True)
class Peers:
    """Checks of the other ranks during a wait: `check` may raise, `is_gone` takes a place in the group."""

    check: Callable[[], None] = lambda: None
    is_gone: Callable[[int], bool] = lambda place: False


class SharedMemoryTransport:
    """Transport of one group; `open_shared` opens it."""

    def __init__(self, memory: mmap.mmap, place: int, size: int, limit: timedelta, peers: Peers | None = None) -> None:
        self._peers = peers or Peers()
        self._place, self._size, self._limit = place, size, limit.total_seconds()
        self._flags = memoryview(memory)[: size * _LINE * 8].cast("Q")
        self._mine = place * _LINE
        self._others = [p * _LINE for p in range(size) if p != place]
        self._round = 0
        start = size * _LINE * 8
        self._slots = [
            [
                torch.frombuffer(memory, dtype=torch.uint8, count=SLOT, offset=start + (2 * p + turn) * SLOT)
                for p in range(size)
            ]
            for turn in (0, 1)
        ]
        self._typed: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        self._flags[self._mine + _PROCESS] = os.getpid()

    def all_reduce(self, out: Tensor, x: Tensor, op: str) -> None:
        """Write the reduction of every rank's `x` to `out`, which is `x` itself or has other memory; any dtype."""
        flat, given = out.view(-1), x.view(-1)
        combined = self._combine_in_parts if self._size > 2 and x.nbytes > _SHARED else self._combine
        for low, high in _ranges(given.numel(), SLOT // x.dtype.itemsize):
            combined(flat[low:high], given[low:high], op)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Write every rank's flat `x` to `out`, one after the other."""
        rows = out.view(self._size, -1)
        for low, high in _ranges(x.numel(), SLOT // x.dtype.itemsize):
            slots = self._swap(x[low:high])
            for row, slot in zip(rows, slots, strict=True):
                row[low:high].copy_(slot[: high - low])

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        """Write the sum over the group of the caller's part of the flat `x` to `out`."""
        rows = x.view(self._size, -1)
        for low, high in _ranges(out.numel(), SLOT // self._size // x.dtype.itemsize):
            own, width = self._slot(x.dtype), high - low
            own[: self._size * width].view(self._size, width).copy_(rows[:, low:high])
            at = self._place * width
            terms = [slot[at : at + width] for slot in self._meet(x.dtype, self._size * width)]
            reduce_into(out[low:high], terms, "sum")

    def all_to_all(self, out: Tensor, x: Tensor, arriving: list[int], leaving: list[int]) -> None:
        """Write every rank's piece for the caller to `out`, flat; lengths are in bytes."""
        self._swap_pieces(out.split(arriving), x.split(leaving))

    def _swap_pieces(self, receives: Sequence[Tensor], sends: Sequence[Tensor]) -> None:
        """Write every rank's piece for the caller to `receives`; both have flat bytes for each place in the group."""
        lane, longest = SLOT // self._size, max(piece.numel() for piece in sends)
        low, rounds = 0, 1
        while low < rounds * lane:
            own = self._slot(torch.uint8)
            for place, piece in enumerate(sends):
                part = piece[low : low + lane]
                own[place * lane : place * lane + part.numel()].copy_(part)
            slots = self._meet(torch.uint8, longest, equal=False)
            rounds = max(rounds, -(-max(self._words()) // lane))
            for slot, piece in zip(slots, receives, strict=True):
                part = piece[low : low + lane]
                part.copy_(slot[self._place * lane : self._place * lane + part.numel()])
            low += lane

    def broadcast(self, x: Tensor, place: int) -> None:
        """Write the flat `x` of the rank at this place to every rank's `x`."""
        for low, high in _ranges(x.numel(), SLOT // x.dtype.itemsize):
            if place == self._place:
                self._slot(x.dtype)[: high - low].copy_(x[low:high])
            slots = self._meet(x.dtype, high - low)
            if place != self._place:
                x[low:high].copy_(slots[place][: high - low])

    def exchange(self, sends: Sequence[PlacedMessage], receives: Sequence[PlacedMessage]) -> None:
        """Exchange all (place in the group, tag, bytes); messages for one rank are in the order of their tags.

        A single message for a rank is neither packed nor unpacked.
        """
        leaving, arriving = self._by_place(sends), self._by_place(receives)
        into = [parts[0] if len(parts) == 1 else _memory_for(parts) for parts in arriving]
        sent = [parts[0] if len(parts) == 1 else torch.cat([_memory_for(()), *parts]) for parts in leaving]
        self._swap_pieces(into, sent)
        for parts, piece in zip(arriving, into, strict=True):
            if len(parts) > 1:
                for part, arrived in zip(parts, piece.split([x.numel() for x in parts]), strict=True):
                    part.copy_(arrived)

    def _by_place(self, messages: Sequence[PlacedMessage]) -> list[list[Tensor]]:
        """Return the messages with each place in the group, in their order."""
        found: list[list[Tensor]] = [[] for _ in range(self._size)]
        for place, _, x in messages:
            found[place].append(x)
        return found

    def barrier(self) -> None:
        """Return once every rank of the group has called it."""
        self._meet(torch.uint8, 0)

    def _combine(self, out: Tensor, x: Tensor, op: str) -> None:
        reduce_into(out, self._swap(x), op)  # not from `x` itself, which may be `out`

    def _combine_in_parts(self, out: Tensor, x: Tensor, op: str) -> None:
        """Reduce one part on each rank, then exchange the results."""
        width = -(-x.numel() // self._size)
        terms = self._swap(x)
        low, high = self._place * width, min((self._place + 1) * width, x.numel())
        own = self._slot(x.dtype)
        reduce_into(own[low:high], [term[low:high] for term in terms], op)
        for place, slot in enumerate(self._meet(x.dtype, x.numel())):
            part = out[place * width : (place + 1) * width]
            part.copy_(slot[place * width : place * width + part.numel()])

    def _swap(self, x: Tensor) -> list[Tensor]:
        """Return every rank's flat `x`; the tensors are valid until the round after the next one."""
        count = x.numel()
        self._slot(x.dtype)[:count].copy_(x)
        return [slot[:count] for slot in self._meet(x.dtype, count)]

    def _slot(self, dtype: torch.dtype) -> Tensor:
        """Return the slot that this rank writes to in the next round."""
        return self._typed_slots(dtype, (self._round + 1) % 2)[self._place]

    def _typed_slots(self, dtype: torch.dtype, turn: int) -> list[Tensor]:
        found = self._typed.get((dtype, turn))
        if found is None:
            found = self._typed[dtype, turn] = [slot.view(dtype) for slot in self._slots[turn]]
        return found

    def _meet(self, dtype: torch.dtype, word: int, equal: bool = True) -> list[Tensor]:
        """Return all slots, once every rank has written its own.

        Raises RuntimeError if the words of the ranks differ.
        """
        self._round = number = self._round + 1
        flags, turn = self._flags, number % 2
        flags[self._mine + _WORDS + turn] = word
        flags[self._mine + _FLAG] = number
        for other in self._others:
            if flags[other] < number:
                self._wait(other, number)
        if equal and any(flags[other + _WORDS + turn] != word for other in self._others):
            raise RuntimeError(f"ranks send {self._words()} elements, but all ranks must send the same number")
        return self._typed_slots(dtype, turn)

    def _words(self) -> list[int]:
        """Return every rank's word in this round."""
        return [self._flags[p * _LINE + _WORDS + self._round % 2] for p in range(self._size)]

    def _wait(self, other: int, number: int) -> None:
        flags = self._flags

        def alarm() -> None:
            self._peers.check()
            if not is_running(flags[other + _PROCESS]) and flags[other] < number:
                raise RuntimeError(f"the process of the rank at index {other // _LINE} in the group has ended")

        if not wait_for(lambda: flags[other] >= number, alarm, self._limit):
            raise RuntimeError(f"the rank at index {other // _LINE} did not join the call within {self._limit:g} s")


def _memory_for(parts: Sequence[Tensor]) -> Tensor:
    """Return memory for the bytes of all parts, one after the other."""
    return torch.empty(sum(part.numel() for part in parts), dtype=torch.uint8, device="cpu")


def contiguous_values(x: Tensor) -> Tensor:
    """Return the tensor contiguous in memory, and with its own numbers: no pending conjugation or negation."""
    return x.resolve_conj().resolve_neg().contiguous()


def _ranges(length: int, step: int) -> list[tuple[int, int]]:
    """Return the (begin, end) of parts of at most `step`; one empty part if the length is 0."""
    return list(pairwise([*range(0, length, step), length])) or [(0, 0)]


def open_shared(
    store: Store, place: int, size: int, limit: timedelta, peers: Peers | None = None
) -> SharedMemoryTransport | None:
    """Return the transport of one group; None if its members cannot all share memory.

    All members get the same answer.
    """
    members = _Members(PrefixStore("shared", store), place, size, limit, peers or Peers())
    homes = members.answers("home", host_identity())
    if not homes[0] or len(set(homes)) > 1:
        return None
    length = size * (_LINE * 8 + 2 * SLOT)
    made = create_region(length) if place == 0 else None
    try:
        if place == 0:
            members.store.set("name", made[0] if made is not None else "")
        memory = made[1] if made is not None else attach_region(members.answer_of(0, "name"), length)
        found = None if memory is None else SharedMemoryTransport(memory, place, size, limit, peers)
        answers = members.answers("open", "no" if found is None else "yes")
    finally:
        if made is not None:
            unlink_region(made[0])
    return found if "no" not in answers else None


@dataclass(frozen=True, slots=True)
class _Members:
    """The members of a group that opens its transport, and the store through which they agree."""

    store: Store
    place: int
    size: int
    limit: timedelta
    peers: Peers

    def answers(self, question: str, mine: str) -> list[str]:
        """Return every member's answer to a question, of which this member gives its own."""
        self.store.set(f"{question}/{self.place}", mine)
        return [self.answer_of(place, f"{question}/{place}") for place in range(self.size)]

    def answer_of(self, place: int, key: str) -> str:
        """Return the value of a key that the member at `place` sets. Raises RuntimeError if the member never will."""
        begin = looked = time.monotonic()
        limit = self.limit.total_seconds()
        while not self.store.check([key]):
            time.sleep(_BETWEEN_ASKS)
            now = time.monotonic()
            if now - begin > limit:
                raise RuntimeError(f"the rank at index {place} did not join the group within {limit:g} s")
            if now - looked > _BETWEEN_LOOKS:
                looked = now
                self.peers.check()
                if self.peers.is_gone(place) and not self.store.check([key]):
                    raise RuntimeError(f"the process of the rank at index {place} in the group has ended")
        return self.store.get(key).decode()
