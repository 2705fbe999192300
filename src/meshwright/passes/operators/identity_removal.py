"""Removal of operators without effect: casts to the same dtype, dropout with p=0, products with one, idle copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from meshwright.graph import (
    Conversion,
    Edit,
    Rewriter,
    RulePass,
    Spot,
    Value,
    alias_pairs,
    register_pass,
    register_rewrite,
)

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


def _remove_copy_into_input(edit: Edit, spot: Spot) -> str | None:
    """Write a value itself into an input, in place of a copy of the value in the input's memory format.

    Without the copy, the pass `in_place` can compute the value in the input's memory, so that no step copies a cache of
    keys. A value that may share memory with an input, such as a view of one, is still copied.
    """
    old, new = spot.args[:2]
    (copied,) = spot.outs
    if not isinstance(new, Value) or not edit.is_result(copied) or edit.users(copied):
        return None
    maker = edit.producer(new)
    if maker is None or isinstance(maker.op, Conversion) or any(True for _ in alias_pairs(maker.node)):
        return None
    if new.dtype != old.dtype or str(new.shape) != str(old.shape):
        return None
    edit.replace(new)
    return f"{new!r} has the type and the shape of {old!r}"


register_rewrite(Rewriter("idle operator", _remove_identity), into="tidy")
register_rewrite(Rewriter("copy into an input", _remove_copy_into_input, on=(aten.copy.default,)), into="tidy")
register_rewrite(Rewriter("transposed twice", _remove_double_transpose, on=(aten.t.default,)), into="tidy")


@register_pass
@dataclass(frozen=True)
class Tidy(RulePass):
    """Remove operators without effect, and double transposes."""

    name: ClassVar[str] = "tidy"
    keeps_sums: ClassVar[bool] = True
