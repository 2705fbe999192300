"""The reductions: the operation on two terms, and the dtypes that each one accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._errors import CallError


class Reduction(NamedTuple):
    """One reduction.

    `join` combines two terms into `out`, which may be one of them. `refuses` is True for a dtype without a meaning, and
    `instead` is the alternative that the error suggests.
    """

    join: Callable[..., object]
    refuses: Callable[[torch.dtype], bool]
    instead: str


def _is_bool(dtype: torch.dtype) -> bool:
    return dtype == torch.bool


def _is_complex(dtype: torch.dtype) -> bool:
    return dtype.is_complex


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _takes_all(dtype: torch.dtype) -> bool:
    return False


REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(torch.add, _is_bool, 'use "any", or cast to an integer dtype'),
    "avg": Reduction(torch.add, _is_whole, 'use "sum", or cast to a floating dtype'),
    "prod": Reduction(torch.mul, _is_bool, 'use "all", or cast to an integer dtype'),
    "max": Reduction(torch.maximum, _is_complex, "take the max of .abs(), or of .real and .imag"),
    "min": Reduction(torch.minimum, _is_complex, "take the min of .abs(), or of .real and .imag"),
    "any": Reduction(torch.logical_or, _takes_all, ""),
    "all": Reduction(torch.logical_and, _takes_all, ""),
}


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """Raise CallError unless `op` is a known reduction with a meaning for the dtype."""
    reduction = REDUCTIONS.get(op)
    if reduction is None:
        raise CallError(
            f"the reduction {op!r}", "an unknown name", f"the reductions are {', '.join(REDUCTIONS)}", 'use "sum"'
        )
    if reduction.refuses(dtype):
        raise CallError(
            f"{op} over ranks", f"a {dtype} tensor", f"{op} has no exact meaning for this dtype", reduction.instead
        )


def reduce_terms(terms: Sequence[Tensor], op: str) -> Tensor:
    """Return the reduction of the terms, first to last, in their own dtype; NaN propagates through max and min."""
    total = torch.empty_like(terms[0], memory_format=torch.contiguous_format)
    reduce_into(total, terms, op)
    return total.div_(len(terms)) if op == "avg" else total


def reduce_into(out: Tensor, terms: Sequence[Tensor], op: str) -> None:
    """Write the reduction of the terms to `out`, which may be the first term; for "avg", write the sum."""
    join = REDUCTIONS[op].join
    first, *rest = terms
    if not rest:
        out.copy_(first != 0 if op in ("any", "all") else first)
    for term in rest:
        join(first, term, out=out)
        first = out
