"""Attention in packed sequences: an operator, and its local forms along a sharded sequence.

The operator takes the number of the document of each row and of each key. It computes blocks of rows, so no mask of
all rows and keys is held. Its gradients are those of a ring of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..notation.local_call import LocalCall
from .ring_attention import Numbers, attend_in_rounds
from .zigzag import RingCall

_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_LIBRARY.define(
    "document_attention(Tensor query, Tensor key, Tensor value, Tensor rows, Tensor keys, bool is_causal=False, *, "
    "float? scale=None, bool enable_gqa=False) -> Tensor"
)


def document_attention_of_one_device(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    keys: Tensor,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute the attention of all rows to all keys."""
    return _by_rounds(OneRank(), (query, key, value), (rows, keys), is_causal, scale, enable_gqa)


_LIBRARY.impl("document_attention", document_attention_of_one_device, "CompositeImplicitAutograd")


def document_attention(
    call: LocalCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    keys: Tensor,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute the attention of the local rows to all keys. Sharded keys travel around the ring of ranks."""
    s = query.dim() - 2
    ring, start = (call, 0) if call.ranks(1, s) > 1 else (OneRank(), call.start(0, s))
    return _by_rounds(ring, (query, key, value), (rows, keys), is_causal, scale, enable_gqa, start)


def _by_rounds(
    call: RingCall,
    qkv: tuple[Tensor, Tensor, Tensor],
    documents: tuple[Tensor, Tensor],
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    start: int = 0,
) -> Tensor:
    of_rows, of_keys = (x.unsqueeze(-1) for x in documents)
    numbers = Numbers(of_rows, of_keys, start if is_causal else None)
    return attend_in_rounds(call, *qkv, None, numbers, is_causal, scale, enable_gqa)


@dataclass(frozen=True, slots=True)
class OneRank:
    """The part of a `LocalCall` that a ring of one rank needs."""

    def ranks(self, operand: int, dim: int) -> int:
        return 1

    def index(self, operand: int, dim: int) -> int:
        return 0

    def permute(self, x: Tensor, operand: int, dim: int, sources: Sequence[int]) -> Tensor:
        return x
