"""Removal of operators without effect: casts to the same dtype, dropout with p=0, products with one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from meshwright.graph import Edit, Rewriter, RulePass, Spot, register_pass, register_rewrite

aten = torch.ops.aten


def _remove_identity(edit: Edit, spot: Spot) -> str | None:
    base = edit.unchanged
    if base is None:
        return None
    edit.replace(base)
    return f"equal to {base!r}"


def _remove_double_transpose(edit: Edit, spot: Spot) -> str | None:
    turned = edit.draft.producer(spot.args[0])
    if turned is None or turned.op is not aten.t.default:
        return None
    edit.replace(turned.args[0])
    return f"{turned.args[0]!r} is transposed twice"


register_rewrite(Rewriter("idle operator", _remove_identity), into="tidy")
register_rewrite(Rewriter("transposed twice", _remove_double_transpose, on=(aten.t.default,)), into="tidy")


@register_pass
@dataclass(frozen=True)
class Tidy(RulePass):
    """Remove operators without effect, and double transposes."""

    name: ClassVar[str] = "tidy"
