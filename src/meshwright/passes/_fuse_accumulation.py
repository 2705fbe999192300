"""Gradients of several pieces of a batch are added up by the products that make them: `acc + a @ b` is one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from meshwright.graph import Edit, Rewriter, RulePass, Spot, Value, register_pass, register_rewrite

from ._rows import is_only_use

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
            return f"{v!r} is added to {acc!r} as it is made"
    return None


register_rewrite(Rewriter("sum and product", _accumulated, on=(aten.add.Tensor,)), into="fuse_accumulation")


@register_pass
@dataclass(frozen=True)
class FuseAccumulation(RulePass):
    """What a weight's gradient is added to is an operand of the product: no sum of its own reads and writes it again.

    For programs of gradient merge, where each piece of the batch adds to the gradients of those before it.
    """

    name: ClassVar[str] = "fuse_accumulation"
