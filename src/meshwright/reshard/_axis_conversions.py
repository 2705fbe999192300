"""Conversions along one mesh axis: their collectives, the bytes that a rank receives, and conversions of gradients.

Along one axis, a tensor is whole (replicated, varying or not), cut (sharded), or terms (partial). The table names the
collective for every two of these roles. It is below `cost`, `tensor`, `graph` and `search`, which price conversions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, Self, TypeVar

AxisRole = Literal["whole", "cut", "terms"]
CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]

_COLLECTIVES: Mapping[tuple[AxisRole, AxisRole], CollectiveKind] = {
    ("terms", "whole"): "all-reduce",
    ("terms", "terms"): "all-reduce",  # of another operation
    ("terms", "cut"): "reduce-scatter",
    ("cut", "whole"): "all-gather",
    ("cut", "terms"): "all-gather",
    ("cut", "cut"): "all-to-all",  # along another dim
}
ROUNDS: Mapping[CollectiveKind, int] = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
"""Number of times that a ring passes every element on."""


def collective_between(have: AxisRole, need: AxisRole) -> CollectiveKind | None:
    """Return the collective that converts a tensor from one role to another; None if ranks need not communicate.

    Two cuts, or terms of two operations, are assumed to differ.

    >>> collective_between("terms", "cut")
    'reduce-scatter'
    """
    return _COLLECTIVES.get((have, need))


def received_share(kind: CollectiveKind, ranks: int) -> float:
    """Return the fraction of the whole tensor that each rank receives in a collective of `ranks`.

    >>> received_share("all-reduce", 4)
    1.5
    """
    share = ROUNDS[kind] * ((ranks - 1) / ranks)
    return share / ranks if kind == "all-to-all" else share


class _HasDual(Protocol):
    def dual(self) -> Self: ...


Form = TypeVar("Form", bound=_HasDual)
"""A spec, or a form along one axis."""


def transposed(src: Form, dst: Form) -> tuple[Form, Form]:
    """Return source and target of the gradient's conversion: the transpose of src → dst is dual(dst) → dual(src)."""
    return dst.dual(), src.dual()
