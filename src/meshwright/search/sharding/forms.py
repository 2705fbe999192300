"""Forms of a value along one axis of ranks, and the collectives that convert one form to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.layout import Dim

Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]
AXIS = "axis"


@dataclass(frozen=True, slots=True)
class AxisForm:
    """Form of a value along the axis: repeated, varying (each rank uses it differently), pending, or cut."""

    kind: str
    dim: int = -1
    cut: Dim = ()

    def __repr__(self) -> str:
        return f"cut {self.dim}" if self.kind == "cut" else self.kind


WHOLE, VARYING, PENDING = AxisForm("repeated"), AxisForm("varying"), AxisForm("sum")


def collective(have: AxisForm, need: AxisForm) -> Collective | None:
    """Return the collective of a conversion; None if each rank has what it needs."""
    if have == need or have in (WHOLE, VARYING):
        return None
    if have.kind == "cut":
        return "all-gather" if need.kind != "cut" else "all-to-all"
    return "reduce-scatter" if need.kind == "cut" else "all-reduce"


def dual(form: AxisForm) -> AxisForm:
    """Return the form of the gradient of a value with this form."""
    return {WHOLE: WHOLE, VARYING: PENDING, PENDING: WHOLE}.get(form, form)
