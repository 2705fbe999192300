"""Fusion of hand-written attention into `scaled_dot_product_attention`; a causal mask becomes `is_causal=True`.

Scores may be scaled. A mask may be added, or scores may be filled where it is True. The softmax may be computed in
float32. For a fully masked row, hand-written attention gives NaN and the operator gives zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.graph import Edit, Match, Rewrite, Rewriter, RulePass, Spot, Value, register_pass, register_rewrite

aten = torch.ops.aten
NEVER = -1e9
"""Upper bound of scores that have zero weight beside any other score."""

SHAPES = "... s d, ... t d, ... t e, * s t"


def hand_written_attention(scores: Tensor, v: Tensor, upcast: bool) -> Tensor:
    weights = F.softmax(scores.float(), -1).to(v.dtype) if upcast else F.softmax(scores, -1)
    return weights @ v


def with_mask(scores: Tensor, mask: Tensor | None) -> Tensor:
    return scores if mask is None else scores + mask


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)


def _keeps_digits(q: Value, upcast: bool) -> bool:
    """False if the softmax is computed in a lower precision than in the operator."""
    return not (upcast and q.dtype == torch.float64)


def _fits_scores(q: Value, mask: Value | None, upcast: bool, match: Match | None) -> bool:
    """True if the mask has the dtype of the scores, or if a cast is exact: it is 0 or at most NEVER everywhere."""
    if mask is None or mask.dtype == q.dtype:
        return _keeps_digits(q, upcast)
    known = match.known(mask) if match is not None else None
    if known is None or not _keeps_digits(q, upcast):
        return False
    hidden = known <= NEVER
    return bool(((known == 0) | hidden).all()) and not bool(hidden.all(-1).any())


def _masks_all_filled(q: Value, mask: Value, fill: float, upcast: bool, match: Match | None) -> bool:
    """True if filled scores have zero weight: -inf, or at most NEVER if each row keeps a score."""
    if fill == -math.inf or not _keeps_digits(q, upcast):
        return _keeps_digits(q, upcast)
    known = match.known(mask) if match is not None and fill <= NEVER else None
    return known is not None and not bool(known.all(-1).any())


RULES = (
    Rewrite(
        "attention",
        find=lambda q, k, v, mask=None, upcast=False, scale=0.5: hand_written_attention(
            with_mask(q @ k.mT * scale, mask), v, upcast
        ),
        put=lambda q, k, v, mask=None, upcast=False, scale=0.5: fused_attention(q, k, v, mask, scale),
        shapes=SHAPES,
        where=_fits_scores,
    ),
    Rewrite(
        "attention without a scale",
        find=lambda q, k, v, mask=None, upcast=False: hand_written_attention(with_mask(q @ k.mT, mask), v, upcast),
        put=lambda q, k, v, mask=None, upcast=False: fused_attention(q, k, v, mask, 1.0),
        shapes=SHAPES,
        where=_fits_scores,
    ),
    Rewrite(
        "attention with scores filled",
        find=lambda q, k, v, mask, fill, upcast=False, scale=0.5: hand_written_attention(
            (q @ k.mT * scale).masked_fill(mask, fill), v, upcast
        ),
        put=lambda q, k, v, mask, fill, upcast=False, scale=0.5: fused_attention(q, k, v, ~mask, scale),
        shapes=SHAPES.replace("*", "bool *"),
        where=_masks_all_filled,
        samples={"fill": (-math.inf, NEVER)},
    ),
    Rewrite(
        "attention without a scale, with scores filled",
        find=lambda q, k, v, mask, fill, upcast=False: hand_written_attention(
            (q @ k.mT).masked_fill(mask, fill), v, upcast
        ),
        put=lambda q, k, v, mask, fill, upcast=False: fused_attention(q, k, v, ~mask, 1.0),
        shapes=SHAPES.replace("*", "bool *"),
        where=_masks_all_filled,
        samples={"fill": (-math.inf, NEVER)},
    ),
)


def _use_is_causal(edit: Edit, spot: Spot) -> str | None:
    """Replace a constant causal mask by `is_causal`."""
    q, k, v, mask, dropout, causal = edit.arguments[:6]
    known = None if mask is None or causal else edit.known(mask)
    if known is None or not _is_causal(known):
        return None
    edit.replace(edit.add(spot.op, q, k, v, None, dropout, True, **spot.kwargs))
    return "the mask is causal"


def _is_causal(mask: Tensor) -> bool:
    if any(n != 1 for n in mask.shape[:-2]) or mask.shape[-1] != mask.shape[-2]:
        return False
    past = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        return torch.equal(mask.reshape(past.shape), past)
    flat = mask.reshape(past.shape)
    return not bool(flat[past].any()) and bool((flat[~past] <= NEVER).all())


for _rule in RULES:
    register_rewrite(_rule, into="fuse_attention")
register_rewrite(
    Rewriter("causal attention", _use_is_causal, (aten.scaled_dot_product_attention.default,)), "fuse_attention"
)


@register_pass
@dataclass(frozen=True)
class FuseAttention(RulePass):
    """Replace product, softmax and product by `scaled_dot_product_attention`."""

    name: ClassVar[str] = "fuse_attention"
