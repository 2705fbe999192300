"""Local forms of layers: embedding with a sharded table, attention over sharded keys, losses over sharded classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod, sqrt

import torch
from torch import Tensor
from torch.nn import functional as F

from ..notation.local_call import LocalCall
from .empty_tensors import empty_result
from .indexing import check_bounds
from .reductions import max_or_lowest, max_over, sum_over

SUM = 2


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
    return weights @ value / sum_over(call, weights.sum(-1, keepdim=True), 1, (t,))


def scale_of(query: Tensor, scale: float | None) -> float:
    """Return the factor of an attention's scores: the given one, or the default for the size of a head."""
    return 1 / sqrt(max(query.shape[-1], 1)) if scale is None else scale


def _attention_scores(query: Tensor, key: Tensor, attn_mask: Tensor | None, scale: float | None) -> Tensor:
    scores = query @ key.mT * scale_of(query, scale)
    if attn_mask is None:
        return scores
    return scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask


def cross_entropy(
    call: LocalCall,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return this rank's term of the loss: each class adds its target probability times (logsumexp - logit)."""
    c = min(x.dim() - 1, 1)
    if call.ranks(0, c) == 1:
        terms = partial(F.cross_entropy, x, target, weight, ignore_index=ignore_index, label_smoothing=label_smoothing)
        return _of_whole_classes(call, terms, x, target, weight, reduction, ignore_index)
    top = max_over(call, max_or_lowest(x.detach(), (c,)), 0, (c,))
    lse = sum_over(call, (x - top).exp().sum(c, keepdim=True), 0, (c,)).log() + top
    if target.dtype.is_floating_point:
        return _class_probability_term(call, lse - x, target, weight, reduction, label_smoothing, c)
    loss, mass = _class_index_term(call, lse - x, target, weight, ignore_index, c)
    if label_smoothing:
        spread = (lse - x if weight is None else (lse - x) * _per_class(weight, x, c)).sum(c)
        spread = torch.where(target == ignore_index, 0, spread)
        loss = loss * (1 - label_smoothing) + spread * (label_smoothing / max(call.total(0, c), 1))
    return _reduced(call, loss, mass, reduction, c)


def nll_loss(
    call: LocalCall,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> Tensor:
    c = min(x.dim() - 1, 1)
    if call.ranks(0, c) == 1:
        terms = partial(F.nll_loss, x, target, weight, ignore_index=ignore_index)
        return _of_whole_classes(call, terms, x, target, weight, reduction, ignore_index)
    loss, mass = _class_index_term(call, -x, target, weight, ignore_index, c)
    return _reduced(call, loss, mass, reduction, c)


def _of_whole_classes(
    call: LocalCall,
    terms: Callable[..., Tensor],
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
) -> Tensor:
    """Return this rank's term of the loss if all classes are local; `terms(reduction=...)` is torch's loss.

    The mean is over the targets of all ranks.
    """
    if reduction == 0:
        return terms(reduction="none")
    if reduction == SUM:
        return terms(reduction="sum")
    if target.dtype.is_floating_point:
        return terms(reduction="sum") / _targets(call, x, min(x.dim() - 1, 1))
    counts = target != ignore_index
    mass = counts if weight is None else torch.where(counts, weight[torch.where(counts, target, 0)], 0)
    return terms(reduction="sum") / _over_targets(call, mass.sum(dtype=x.dtype), target.dim() + 1)


def _class_index_term(
    call: LocalCall, x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, c: int
) -> tuple[Tensor, Tensor]:
    """Return the weighted `x` at the target class, and the weight; both are zero if another rank holds the class."""
    check_bounds(torch.where(target == ignore_index, 0, target), max(call.total(0, c), 1), c)
    local = target - call.start(0, c)
    mine = (local >= 0) & (local < x.shape[c]) & (target != ignore_index)
    if x.shape[c] == 0:
        empty = x.sum(c)
        return empty, empty.detach()
    local = torch.where(mine, local, 0)
    mass = mine.to(x.dtype) if weight is None else torch.where(mine, weight[local], 0)
    picked = x.gather(c, local.unsqueeze(c)).squeeze(c)
    return torch.where(mine, picked, 0) * mass, mass


def _class_probability_term(
    call: LocalCall, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, label_smoothing: float, c: int
) -> Tensor:
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / max(call.total(0, c), 1)
    x = x if weight is None else x * _per_class(weight, x, c)
    loss = (x * target).sum(c)
    if reduction == 0:
        return loss
    return loss.sum() / (_targets(call, x, c) if reduction == 1 else 1)


def _targets(call: LocalCall, x: Tensor, c: int) -> int:
    """Return the number of targets of all ranks, by which torch divides; 0 without classes (dim `c`)."""
    sizes = [call.total(0, d) for d in range(x.dim())]
    return prod(sizes) // sizes[c] if sizes[c] else 0


def _per_class(weight: Tensor, x: Tensor, c: int) -> Tensor:
    return weight.reshape([-1 if d == c else 1 for d in range(x.dim())])


def _reduced(call: LocalCall, loss: Tensor, mass: Tensor, reduction: int, c: int) -> Tensor:
    """Return the reduced loss. The mean is over the weights of all targets on all ranks that are not ignored."""
    if reduction == 0:
        return loss
    if reduction == SUM:
        return loss.sum()
    return loss.sum() / _over_targets(call, mass.sum(), loss.dim() + 1)


def _over_targets(call: LocalCall, mass: Tensor, ndim: int) -> Tensor:
    """Return the sum of the targets' weights over all ranks, for logits of `ndim` dims."""
    return sum_over(call, mass, 0, tuple(range(ndim)))
