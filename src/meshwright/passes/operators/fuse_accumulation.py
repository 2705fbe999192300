"""Fusion of gradient accumulation with the matrix products: `acc + a @ b` becomes one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from meshwright.graph import Edit, Rewriter, RulePass, Spot, Value, register_pass, register_rewrite

from .._rows import is_only_use

aten = torch.ops.aten


def _accumulated(edit: Edit, spot: Spot) -> str | None:
    if spot.op is not aten.add.Tensor or spot.kwargs or spot.origin.phase != "backward":
        return None
    for acc, v in (spot.args, spot.args[::-1]):
        made = edit.draft.producer(v) if isinstance(v, Value) else None
        if made is None or made.op is not aten.mm.default or not is_only_use(edit.draft, v, spot):
            continue
        if isinstance(acc, Value) and acc.sizes == v.sizes and acc.dtype == v.dtype:
            edit.replace(edit.add(aten.addmm.default, acc, *made.args))
            return f"the product {v!r} is computed directly into {acc!r}"
    return None


register_rewrite(Rewriter("sum and product", _accumulated, on=(aten.add.Tensor,)), into="fuse_accumulation")


@register_pass
@dataclass(frozen=True)
class FuseAccumulation(RulePass):
    """Add a weight's gradient to the accumulated gradient inside the matrix product, without a separate sum.

    For programs with gradient accumulation, in which each microbatch adds to the gradients of the earlier ones.
    """

    name: ClassVar[str] = "fuse_accumulation"
