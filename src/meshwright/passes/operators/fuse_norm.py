"""Fusion of hand-written RMS norms and layer norms, with or without weight and bias, into one operator.

Each rule is a small step; several rules in a row match one style of writing. Intermediate rounding is kept: in
`w * norm(x.float()).to(x.dtype)` of a 16-bit x, the weight is not fused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.graph import Rewrite, RulePass, Value, register_pass, register_rewrite

COARSE = (torch.bfloat16, torch.float16)


def _is_fine(x: Value) -> bool:
    """True if the dtype is not 16-bit, so that fusion removes no rounding that matters."""
    return x.dtype not in COARSE


def _is_coarse(x: Value) -> bool:
    return x.dtype in COARSE


def rms_norm_of(x: Tensor, w: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w, eps)


def layer_norm_of(x: Tensor, w: Tensor | None = None, b: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, eps)


def centered(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


RMS = (
    Rewrite(
        "rms_norm",
        find=lambda x, eps=1e-6: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps),
        put=lambda x, eps=1e-6: rms_norm_of(x, None, eps),
        shapes="... d",
    ),
    Rewrite(
        "rms_norm of a cast",
        find=lambda x, eps=1e-6: rms_norm_of(x.float(), None, eps).to(x.dtype),
        put=lambda x, eps=1e-6: rms_norm_of(x, None, eps),
        shapes="... d",
        where=_is_coarse,
    ),
    Rewrite(
        "rms_norm with a weight",
        find=lambda x, w, eps=1e-6: rms_norm_of(x, None, eps) * w,
        put=lambda x, w, eps=1e-6: rms_norm_of(x, w, eps),
        shapes="... d, d",
        where=lambda x, w: _is_fine(x) and w.dtype == x.dtype,
    ),
    Rewrite(
        "rms_norm of casts with a weight",
        find=lambda x, w, eps=1e-6: rms_norm_of(x.float(), w.float(), eps).to(x.dtype),
        put=lambda x, w, eps=1e-6: rms_norm_of(x, w, eps),
        shapes="... d, d",
        where=lambda x, w: _is_coarse(x) and w.dtype == x.dtype,
    ),
)

LAYER = (
    Rewrite(
        "layer_norm",
        find=lambda x, eps=1e-5: centered(x) * torch.rsqrt(centered(x).square().mean(-1, keepdim=True) + eps),
        put=lambda x, eps=1e-5: layer_norm_of(x, None, None, eps),
        shapes="... d",
    ),
    Rewrite(
        "layer_norm of a cast",
        find=lambda x, eps=1e-5: layer_norm_of(x.float(), None, None, eps).to(x.dtype),
        put=lambda x, eps=1e-5: layer_norm_of(x, None, None, eps),
        shapes="... d",
        where=_is_coarse,
    ),
    Rewrite(
        "layer_norm with a weight",
        find=lambda x, w, eps=1e-5: layer_norm_of(x, None, None, eps) * w,
        put=lambda x, w, eps=1e-5: layer_norm_of(x, w, None, eps),
        shapes="... d, d",
        where=lambda x, w: _is_fine(x) and w.dtype == x.dtype,
    ),
    Rewrite(
        "layer_norm with a bias",
        find=lambda x, b, w=None, eps=1e-5: layer_norm_of(x, w, None, eps) + b,
        put=lambda x, b, w=None, eps=1e-5: layer_norm_of(x, w, b, eps),
        shapes="... d, d, d",
        where=lambda x, b: _is_fine(x) and b.dtype == x.dtype,
    ),
    Rewrite(
        "layer_norm of casts with weight and bias",
        find=lambda x, w, b, eps=1e-5: layer_norm_of(x.float(), w.float(), b.float(), eps).to(x.dtype),
        put=lambda x, w, b, eps=1e-5: layer_norm_of(x, w, b, eps),
        shapes="... d, d, d",
        where=lambda x, w, b: _is_coarse(x) and w.dtype == b.dtype == x.dtype,
    ),
)  # fmt: skip

for _rule in (*RMS, *LAYER):
    register_rewrite(_rule, into="fuse_norm")


@register_pass
@dataclass(frozen=True)
class FuseNorm(RulePass):
    """Replace hand-written norms by `rms_norm` and `layer_norm`."""

    name: ClassVar[str] = "fuse_norm"
