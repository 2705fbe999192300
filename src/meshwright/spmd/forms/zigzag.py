"""The zigzag order of a sequence, in which causal attention is equal work for all ranks of a ring.

With causal attention, rows of later ranks would have more work. So the sequence is split into two chunks per rank, and
rank i of p has the chunks i and 2p - 1 - i, not its own chunks 2i and 2i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class RingCall(Protocol):
    """The part of a `LocalCall` that a ring needs."""

    def ranks(self, operand: int, dim: int) -> int: ...

    def index(self, operand: int, dim: int) -> int: ...

    def permute(self, x: Tensor, operand: int, dim: int, sources: Sequence[int]) -> Tensor: ...


def zigzag(call: RingCall, x: Tensor, s: int) -> Tensor:
    """Return the chunks i and 2p - 1 - i on rank i, for its chunks 2i and 2i + 1."""
    halves = zip(x.chunk(2, -2), _chunk_sources(call, s), strict=True)
    even, odd = (call.permute(half, 0, s, sources) for half, sources in halves)
    is_even = ring_index(call, x, s) % 2 == 0
    return torch.cat((torch.where(is_even, even, odd), torch.where(is_even, odd, even)), -2)


def zagzig(call: RingCall, x: Tensor, s: int) -> Tensor:
    """Return the chunks 2i and 2i + 1 on rank i, for its chunks i and 2p - 1 - i."""
    first, last = x.chunk(2, -2)
    is_even = ring_index(call, x, s) % 2 == 0
    halves = torch.where(is_even, first, last), torch.where(is_even, last, first)
    targets = map(_inverse, _chunk_sources(call, s))
    return torch.cat([call.permute(half, 0, s, to) for half, to in zip(halves, targets, strict=True)], -2)


def _chunk_sources(call: RingCall, s: int) -> tuple[list[int], list[int]]:
    """Return, for each rank, the source rank of its even chunk, and the source rank of its odd chunk."""
    last = 2 * call.ranks(0, s) - 1
    evens = [last - i if i % 2 else i for i in range(call.ranks(0, s))]
    return [even // 2 for even in evens], [(last - even) // 2 for even in evens]


def _inverse(sources: Sequence[int]) -> list[int]:
    return sorted(range(len(sources)), key=sources.__getitem__)


def ring_index(call: RingCall, like: Tensor, s: int) -> Tensor:
    """Return this rank's index on the ring, as a tensor, since it differs between ranks."""
    return torch.arange(1, device=like.device) + call.index(0, s)
