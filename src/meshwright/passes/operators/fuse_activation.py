"""Fusion of hand-written linear layers and activations into one operator each."""

# ruff: noqa: PLW0108 - both sides of a rule name their arguments
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from meshwright.graph import AnyRewrite, Rewrite, RulePass, register_pass, register_rewrite

LINEAR = (
    Rewrite(
        "linear",
        find=lambda x, w, b: x @ w.mT + b,
        put=lambda x, w, b: F.linear(x, w, b),
        shapes="... k, n k, n",
        where=lambda x, w, b: x.dtype == w.dtype == b.dtype,
    ),
    Rewrite(
        "linear of a transposed weight",
        find=lambda x, w, b: x @ w + b,
        put=lambda x, w, b: F.linear(x, w.mT, b),
        shapes="... k, k n, n",
        where=lambda x, w, b: x.dtype == w.dtype == b.dtype,
        benefit=-1,
    ),
    Rewrite(
        "linear without a bias",
        find=lambda x, w: x @ w.mT,
        put=lambda x, w: F.linear(x, w),
        shapes="... k, n k",
        benefit=-1,
    ),
)

ACTIVATION = (
    Rewrite("silu", find=lambda x: x * torch.sigmoid(x), put=lambda x: F.silu(x)),
    Rewrite("gelu", find=lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), put=lambda x: F.gelu(x)),
    Rewrite("gelu, factors in another order",
        find=lambda x: 0.5 * (x * (1 + torch.erf(x / math.sqrt(2)))), put=lambda x: F.gelu(x)),
    Rewrite(
        "gelu by tanh",
        find=lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
        put=lambda x: F.gelu(x, approximate="tanh"),
    ),
)  # fmt: skip

MERGE = Rewrite(
    "two linear layers of one operand",
    find=lambda x, v, w: (F.linear(x, v), F.linear(x, w)),
    put=lambda x, v, w: F.linear(x, torch.cat((v, w))).split((v.shape[0], w.shape[0]), -1),
    shapes="... k, m k, n k",
    where=lambda v, w: v.dtype == w.dtype,
)

for _rule in (*LINEAR, *ACTIVATION):
    register_rewrite(_rule, into="fuse_activation")


@register_pass
@dataclass(frozen=True)
class FuseActivation(RulePass):
    """Replace `x @ w.T + b` by `linear`, and hand-written activations by `silu` and `gelu`.

    With `merge`, two linear layers of one operand, such as the halves of a SwiGLU, become one with joined weights.
    """

    name: ClassVar[str] = "fuse_activation"
    merge: bool = False

    def applied(self) -> tuple[AnyRewrite, ...]:
        rules = super().applied()
        return (*rules, MERGE) if self.merge else rules
