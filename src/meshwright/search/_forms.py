"""How a value lies along one axis of ranks, and which collective makes one form of another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.layout import Dim

Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]
AXIS = "axis"


@dataclass(frozen=True, slots=True)
class Form:
    """How a value lies along the axis: repeated, varying (each rank uses it differently), pending, or cut."""

    kind: str
    dim: int = -1
    cut: Dim = ()

    def __repr__(self) -> str:
        return f"cut {self.dim}" if self.kind == "cut" else self.kind


WHOLE, VARYING, PENDING = Form("repeated"), Form("varying"), Form("sum")


def collective(have: Form, need: Form) -> Collective | None:
    """What ranks do for a conversion; nothing where each has what it needs."""
    if have == need or have in (WHOLE, VARYING):
        return None
    if have.kind == "cut":
        return "all-gather" if need.kind != "cut" else "all-to-all"
    return "reduce-scatter" if need.kind == "cut" else "all-reduce"


def dual(form: Form) -> Form:
    """The form of the gradient of a value with this form."""
    return {WHOLE: WHOLE, VARYING: PENDING, PENDING: WHOLE}.get(form, form)
