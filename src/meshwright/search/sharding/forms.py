"""Forms of a value along one axis of ranks, and the collectives that convert one form to another."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.layout import Dim
from meshwright.reshard import AxisRole, CollectiveKind, collective_between

AXIS = "axis"


@dataclass(frozen=True, slots=True)
class AxisForm:
    """Form of a value along the axis: repeated, varying (each rank uses it differently), pending, or cut."""

    kind: str
    dim: int = -1
    cut: Dim = ()

    @property
    def role(self) -> AxisRole:
        if self.kind in ("repeated", "varying"):
            return "whole"
        return "cut" if self.kind == "cut" else "terms"

    def dual(self) -> AxisForm:
        """Return the form of the gradient of a value with this form."""
        return {VARYING: PENDING, PENDING: WHOLE}.get(self, self)

    def __repr__(self) -> str:
        return f"cut {self.dim}" if self.kind == "cut" else self.kind


WHOLE, VARYING, PENDING = AxisForm("repeated"), AxisForm("varying"), AxisForm("sum")


def collective(have: AxisForm, need: AxisForm) -> CollectiveKind | None:
    """Return the collective of a conversion; None if each rank has what it needs."""
    return None if have == need else collective_between(have.role, need.role)
