"""Conditions under which operands of a linear operator may be pending sums.

In exact arithmetic a linear operator may be applied to every term of a pending sum. In floating point this is wrong in
three cases: a factor is not finite (`inf * 3 + inf * -1` is NaN, `inf * (3 - 1)` is infinite), terms are divided by
zero, or a large factor makes terms overflow although their sum does not. So a pending sum passes an operator only if
each of its factors is a mask, or a number of at most `largest_factor(dtype)` in magnitude. The elements of a floating
tensor are unknown, so a sum is reduced before it is multiplied with a floating tensor. Integer arithmetic wraps around
and is exact within one dtype: a sum that wrapped around is no sum of wider integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ..notation.equation import Equation

Number = (int, float, complex)


@dataclass(frozen=True, slots=True)
class PendingOperands:
    """Indices of operands: `pending` may be pending sums, `fillable` may be a value on one rank and zeros on others."""

    pending: frozenset[int]
    fillable: frozenset[int]


NONE = PendingOperands(frozenset(), frozenset())


def pending_operands(equation: Equation, operands: Sequence[Any], scales: Sequence[Any]) -> PendingOperands:
    """Return which operands of a call may be terms.

    `operands` are tensors, numbers, or None for an absent operand. `scales` are the call's other numbers, such as
    `alpha`; it is unknown which operand they multiply.
    """
    everything = frozenset(range(len(operands)))
    linear = {i for product in equation.products for i in product}
    given = [x for i, x in enumerate(operands) if i not in linear]
    widened = _is_widened([operands[i] for i in linear], given, scales)
    if _is_integral([*operands, *scales]) and not any(isinstance(x, Number) for x in given):
        return PendingOperands(frozenset() if widened else everything, everything)
    if not all(_is_finite_scale(c) for c in scales) or not all(_keeps_zero(x) for x in given):
        return NONE
    others = {i: [operands[j] for j in product if j != i] for product in equation.products for i in product}
    fillable = frozenset(i for i, factors in others.items() if all(map(_is_finite, factors)))
    limit = min((largest_factor(x.dtype) for x in operands if isinstance(x, Tensor) and not _selects(x)), default=1.0)
    if not all(abs(c) <= limit for c in scales) or not all(_divides(x, limit) for x in given):
        return PendingOperands(frozenset(), fillable)
    pending = frozenset(i for i in fillable if all(_keeps_terms(x, limit) for x in others[i]))
    return PendingOperands(frozenset(i for i in pending if not (widened and _wraps(operands[i]))), fillable)


def is_exact_factor(factor: float | complex, dtype: torch.dtype) -> bool:
    """True if every term of a sum of this dtype may be multiplied with `factor`; a factor of 0 would lose signs."""
    return 0 < abs(factor) <= largest_factor(dtype)


def largest_factor(dtype: torch.dtype) -> float:
    """Return the magnitude up to which a number may multiply the terms of a sum.

    65,536 is the usual initial scale of a gradient scaler. With this factor, terms above 5e33 overflow in float32 and
    bfloat16. The largest float16 number is 65,504, so terms in float16 must not grow at all.
    """
    is_wide = (dtype.is_floating_point or dtype.is_complex) and torch.finfo(dtype).max > _LARGEST_OF_HALF
    return 65536.0 if is_wide else 1.0


_LARGEST_OF_HALF = torch.finfo(torch.float16).max


def _is_integral(values: Sequence[Any]) -> bool:
    return all(isinstance(x, int) or x is None or (isinstance(x, Tensor) and _selects(x)) for x in values)


def _wraps(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype != torch.bool and _selects(x)


def _is_widened(linear: Sequence[Any], divisors: Sequence[Any], scales: Sequence[Any]) -> bool:
    """True if integer operands give a result of another dtype, so that sums that wrap around are joined first."""
    dtypes = {x.dtype for x in linear if isinstance(x, Tensor) and x.dtype != torch.bool}
    is_floating = any(isinstance(x, (float, complex)) for x in (*linear, *scales))
    return len(dtypes) > 1 or is_floating or any(isinstance(x, Number) for x in divisors)


def _selects(x: Tensor) -> bool:
    """True for a mask or for indices."""
    return not (x.dtype.is_floating_point or x.dtype.is_complex)


def _is_finite_scale(c: Any) -> bool:
    return isfinite(abs(c))


def _is_finite(factor: Any) -> bool:
    """True if zero times the factor is zero."""
    if factor is None:
        return True
    return _selects(factor) if isinstance(factor, Tensor) else isfinite(abs(factor))


def _keeps_terms(factor: Any, limit: float) -> bool:
    if factor is None:
        return True
    return factor.dtype == torch.bool if isinstance(factor, Tensor) else 0 < abs(factor) <= limit


def _keeps_zero(given: Any) -> bool:
    """True if zero divided by the number is zero, or if the tensor selects elements."""
    if given is None:
        return True
    return _selects(given) if isinstance(given, Tensor) else given != 0 and isfinite(abs(given))


def _divides(given: Any, limit: float) -> bool:
    """True unless `given` is a number so small that dividing a term by it may overflow."""
    return given is None or isinstance(given, Tensor) or abs(given) * limit >= 1
