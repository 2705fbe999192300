"""Conditions under which operands of a linear operator may be pending sums.

In exact arithmetic a linear operator may be applied to every term of a pending sum. In floating point this is wrong in
three cases: a factor is not finite (`inf * 3 + inf * -1` is NaN, `inf * (3 - 1)` is infinite), terms are divided by
zero, or a large factor makes terms overflow although their sum does not. So a pending sum passes an operator only if
each of its factors is a mask, or a number of at most `largest_factor(dtype)` in magnitude. The elements of a floating
tensor are unknown, so a sum is reduced before it is multiplied with a floating tensor. Integer arithmetic wraps around
and is exact within one dtype: a sum that wrapped around is no sum of wider integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite

import torch
from torch import Tensor

from ..notation.equation import Equation

Number = (int, float, complex)
Operand = Tensor | complex | None
"""A tensor, a number, or an absent operand."""


@dataclass(frozen=True, slots=True)
class PendingOperands:
    """Indices of operands: `pending` may be pending sums, `fillable` may be a value on one rank and zeros on others."""

    pending: frozenset[int]
    fillable: frozenset[int]


NONE = PendingOperands(frozenset(), frozenset())


def pending_operands(equation: Equation, operands: Sequence[Operand], scales: Sequence[complex]) -> PendingOperands:
    """Return which operands of a call may be terms.

    `operands` are tensors, numbers, or None for an absent operand. `scales` are the call's other numbers, such as
    `alpha`; it is unknown which operand they multiply.
    """
    linear, given = _by_linearity(equation, operands)
    is_widened = _is_widened(linear, given, scales)
    if _is_integral([*operands, *scales]) and not _has_number(given):
        everything = frozenset(range(len(operands)))
        return PendingOperands(frozenset() if is_widened else everything, everything)
    if not (all(map(is_finite, scales)) and all(map(_keeps_zero, given))):
        return NONE
    factors = _other_factors(equation, operands)
    fillable = _with_finite_factors(factors)
    limit = _limit_of_factors(operands)
    if not _are_within(limit, scales, given):
        return PendingOperands(frozenset(), fillable)
    waiting = {i for i in fillable if is_widened and _may_wrap(operands[i])}
    pending = frozenset(i for i in fillable - waiting if _keep_terms(factors[i], limit))
    return PendingOperands(pending, fillable)


def _by_linearity(equation: Equation, operands: Sequence[Operand]) -> tuple[list[Operand], list[Operand]]:
    """Return the operands in which the rule is linear, and the others."""
    linear = {*chain(*equation.products)}
    return [operands[i] for i in linear], [x for i, x in enumerate(operands) if i not in linear]


def _other_factors(equation: Equation, operands: Sequence[Operand]) -> dict[int, list[Operand]]:
    """Return, for each operand in a product, the other operands of the product."""
    return {i: [operands[j] for j in product if j != i] for product in equation.products for i in product}


def _with_finite_factors(factors: Mapping[int, Sequence[Operand]]) -> frozenset[int]:
    """Return the operands whose other factors keep zeros as they are."""
    return frozenset(i for i, others in factors.items() if all(map(is_finite, others)))


def _limit_of_factors(operands: Sequence[Operand]) -> float:
    """Return the magnitude up to which a number may multiply the terms of every floating operand."""
    floating = [x for x in operands if isinstance(x, Tensor) and not _is_mask_or_index(x)]
    return min((largest_factor(x.dtype) for x in floating), default=1.0)


def _are_within(limit: float, scales: Sequence[complex], divisors: Sequence[Operand]) -> bool:
    """True if neither the scales nor the divisors may make a term overflow."""
    return all(abs(c) <= limit for c in scales) and all(_divides_safely(x, limit) for x in divisors)


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


def _has_number(values: Sequence[Operand]) -> bool:
    return any(isinstance(x, Number) for x in values)


def _is_integral(values: Sequence[Operand]) -> bool:
    return all(isinstance(x, int) or x is None or (isinstance(x, Tensor) and _is_mask_or_index(x)) for x in values)


def _may_wrap(x: Operand) -> bool:
    return isinstance(x, Tensor) and x.dtype != torch.bool and _is_mask_or_index(x)


def _is_widened(linear: Sequence[Operand], divisors: Sequence[Operand], scales: Sequence[complex]) -> bool:
    """True if integer operands give a result of another dtype, so that sums that wrap around are joined first."""
    dtypes = {x.dtype for x in linear if isinstance(x, Tensor) and x.dtype != torch.bool}
    is_floating = any(isinstance(x, (float, complex)) for x in (*linear, *scales))
    return len(dtypes) > 1 or is_floating or _has_number(divisors)


def _is_mask_or_index(x: Tensor) -> bool:
    """True for a mask or for indices."""
    return not (x.dtype.is_floating_point or x.dtype.is_complex)


def is_finite(factor: Operand) -> bool:
    """True if zero times the factor is zero."""
    if factor is None:
        return True
    return _is_mask_or_index(factor) if isinstance(factor, Tensor) else isfinite(abs(factor))


def _keep_terms(factors: Sequence[Operand], limit: float) -> bool:
    """True if a term may be multiplied with all factors."""
    return all(_keeps_terms(x, limit) for x in factors)


def _keeps_terms(factor: Operand, limit: float) -> bool:
    if factor is None:
        return True
    return factor.dtype == torch.bool if isinstance(factor, Tensor) else 0 < abs(factor) <= limit


def _keeps_zero(given: Operand) -> bool:
    """True if zero divided by the number is zero, or if the tensor selects elements."""
    if given is None:
        return True
    return _is_mask_or_index(given) if isinstance(given, Tensor) else given != 0 and isfinite(abs(given))


def _divides_safely(given: Operand, limit: float) -> bool:
    """True unless `given` is a number so small that dividing a term by it may overflow."""
    return given is None or isinstance(given, Tensor) or abs(given) * limit >= 1
