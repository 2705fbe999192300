"""Attention with dropout in blocks of rows: an operator, and its local forms.

The factors of the weights follow from a key of random bits and from the places of the weights in the whole. So every
rank draws the factors of its own blocks, and draws them again in the backward pass. No rank holds all weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..notation.local_call import LocalCall
from .document_attention import OneRank
from .ring_attention import Numbers, attend_in_rounds
from .zigzag import RingCall

_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_LIBRARY.define(
    "attention_with_dropout(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor bits, float dropout_p, "
    "bool is_causal, float scale) -> Tensor"
)
_LIBRARY.define(
    "dropout_factors(Tensor bits, Tensor batch, Tensor heads, Tensor rows, Tensor keys, SymInt[] shape, float p, "
    "ScalarType dtype) -> Tensor"
)


def _shown(
    bits: Tensor,
    batch: Tensor,
    heads: Tensor,
    rows: Tensor,
    keys: Tensor,
    shape: list[int],
    p: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return an empty tensor like the factors (batch, heads, rows, keys)."""
    return torch.empty([x.shape[0] for x in (batch, heads, rows, keys)], dtype=dtype, device=rows.device)


_LIBRARY.impl("dropout_factors", _shown, "Meta")


@dataclass(frozen=True, slots=True)
class _Drops:
    """The factors of the weights of the local batch and heads; `shape` is that of all weights."""

    bits: Tensor
    batch: Tensor
    heads: Tensor
    shape: tuple[int, ...]
    p: float
    dtype: torch.dtype

    def __call__(self, rows: Tensor, keys: Tensor) -> Tensor:
        places = self.batch, self.heads, rows.flatten(), keys.flatten()
        return torch.ops.meshwright.dropout_factors(self.bits, *places, self.shape, self.p, self.dtype)


def _by_one_rank(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bits: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> Tensor:
    shape = (*query.shape[:-1], key.shape[-2])
    drops = _drops((0, 0), query, bits, shape, dropout_p)
    return _by_rounds(OneRank(), (query, key, value), mask, (0, 0), drops, is_causal, scale)


_LIBRARY.impl("attention_with_dropout", _by_one_rank, "CompositeImplicitAutograd")


def dropped_attention(
    call: LocalCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bits: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Compute attention with dropout of the local rows to all keys. Sharded keys travel around the ring of ranks."""
    drops = _drops((call.start(0, 0), call.start(0, 1)), query, bits, _weights(call), dropout_p)
    starts = call.start(0, 2), call.start(1, 2)
    ring = call if call.ranks(1, 2) > 1 else OneRank()
    return _by_rounds(ring, (query, key, value), mask, starts, drops, is_causal, scale)


def _weights(call: LocalCall) -> tuple[int, ...]:
    """Return the shape of all weights (batch, heads, rows, keys)."""
    return (*(call.total(0, d) for d in range(3)), call.total(1, 2))


def _drops(starts: tuple[int, int], query: Tensor, bits: Tensor, shape: tuple[int, ...], p: float) -> _Drops:
    batch, heads = (torch.arange(query.shape[d], device=query.device) + starts[d] for d in range(2))
    return _Drops(bits, batch, heads, shape, p, query.dtype)


def _by_rounds(
    call: RingCall,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    starts: tuple[int, int],
    drops: _Drops,
    is_causal: bool,
    scale: float,
) -> Tensor:
    query, key, _ = qkv
    of_rows, of_keys = (
        (torch.arange(x.shape[-2], device=x.device) + start).unsqueeze(-1)
        for x, start in zip((query, key), starts, strict=True)
    )
    first = starts[0] if call.ranks(0, 2) == 1 else 0
    numbers = Numbers(of_rows, of_keys, first if is_causal else None, drops)
    return attend_in_rounds(call, *qkv, mask, numbers, is_causal, scale, enable_gqa=False)
