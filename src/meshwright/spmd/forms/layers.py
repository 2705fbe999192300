"""Local forms of layers: embedding with a sharded table, attention over sharded keys."""

from __future__ import annotations

from math import prod, sqrt

import torch
from torch import Tensor
from torch.nn import functional as F

from ..notation.local_call import LocalCall
from .empty_tensors import empty_result
from .indexing import check_bounds
from .reductions import max_or_lowest, max_over, sum_over


def embedding(
    call: LocalCall, weight: Tensor, indices: Tensor, padding_idx: int = -1, by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """Look up the ids of this rank's rows, with zero for other ids. The sum over ranks is the full lookup."""
    if call.ranks(0, 0) == 1:
        return torch.ops.aten.embedding(weight, indices, padding_idx)
    check_bounds(indices, call.total(0, 0), 0)
    local = indices - call.start(0, 0)
    mine = (local >= 0) & (local < weight.shape[0])
    if weight.shape[0] == 0:
        return weight.new_zeros((*indices.shape, weight.shape[1])) + weight.sum() * 0
    rows = F.embedding(torch.where(mine, local, 0), weight)
    if padding_idx >= 0:
        rows = torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return torch.where(mine.unsqueeze(-1), rows, 0)


def attention(
    call: LocalCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention with sharded batch, heads or sequences. Sharded keys give terms of a sum."""
    s, t = query.dim() - 2, key.dim() - 2
    if 0 in (prod(query.shape[:-1]), key.shape[-3] if enable_gqa else 1):
        return empty_result(call, query, query, key, key, value)
    if call.ranks(0, s) == call.ranks(1, t) == 1:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if is_causal:
        rows = torch.arange(query.shape[s], device=query.device).unsqueeze(1) + call.start(0, s)
        attn_mask = rows >= torch.arange(key.shape[t], device=key.device) + call.start(1, t)
    if call.ranks(1, t) == 1:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = _attention_scores(query, key, attn_mask, scale)
    last = (scores.dim() - 1,)
    top = max_over(call, max_or_lowest(scores.detach(), last), 1, (t,))
    weights = (scores - torch.where(top.isinf(), 0, top)).exp()
    total = sum_over(call, weights.sum(-1, keepdim=True), 1, (t,))
    return weights @ value / torch.where(total == 0, 1, total)  # a row that sees no key has no weights


def scale_of(query: Tensor, scale: float | None) -> float:
    """Return the factor of an attention's scores: the given one, or the default for the size of a head."""
    return 1 / sqrt(max(query.shape[-1], 1)) if scale is None else scale


def _attention_scores(query: Tensor, key: Tensor, attn_mask: Tensor | None, scale: float | None) -> Tensor:
    scores = query @ key.mT * scale_of(query, scale)
    if attn_mask is None:
        return scores
    return scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
