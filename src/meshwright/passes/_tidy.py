"""Operators that change nothing go: casts to the dtype that is there, dropout that drops nothing, products with one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from meshwright.graph import Edit, Rewriter, RulePass, Spot, register_pass, register_rewrite


def _drop(edit: Edit, spot: Spot) -> str | None:
    base = edit.unchanged
    if base is None:
        return None
    edit.replace(base)
    return f"{base!r} is the same"


register_rewrite(Rewriter("idle operator", _drop), into="tidy")


@register_pass
@dataclass(frozen=True)
class Tidy(RulePass):
    """Takes out operators that change nothing."""

    name: ClassVar[str] = "tidy"
