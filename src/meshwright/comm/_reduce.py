"""The reductions: which dtypes each one takes, and how two terms become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._errors import CallError


class Reduction(NamedTuple):
    """How two terms become one (into the first, which is ours to write), and the dtypes that have no meaning."""

    combine: Callable[[Tensor, Tensor], object]
    refuses: Callable[[torch.dtype], bool]
    instead: str


def _is_bool(dtype: torch.dtype) -> bool:
    return dtype == torch.bool


def _is_complex(dtype: torch.dtype) -> bool:
    return dtype.is_complex


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _max(a: Tensor, b: Tensor) -> object:
    return torch.maximum(a, b, out=a)


def _min(a: Tensor, b: Tensor) -> object:
    return torch.minimum(a, b, out=a)


def _any(a: Tensor, b: Tensor) -> object:
    return a.logical_or_(b)


def _all(a: Tensor, b: Tensor) -> object:
    return a.logical_and_(b)


def _takes_all(dtype: torch.dtype) -> bool:
    return False


REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(Tensor.add_, _is_bool, '"any", or a cast to an integer dtype'),
    "avg": Reduction(Tensor.add_, _is_whole, '"sum", or a cast to a floating dtype'),
    "prod": Reduction(Tensor.mul_, _is_bool, '"all", or a cast to an integer dtype'),
    "max": Reduction(_max, _is_complex, "max of .abs(), or of .real and .imag"),
    "min": Reduction(_min, _is_complex, "min of .abs(), or of .real and .imag"),
    "any": Reduction(_any, _takes_all, ""),
    "all": Reduction(_all, _takes_all, ""),
}


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """A known reduction that has a meaning for the dtype; CallError otherwise."""
    reduction = REDUCTIONS.get(op)
    if reduction is None:
        raise CallError(f"the reduction {op!r}", f"none of {', '.join(REDUCTIONS)}", "it is not known", '"sum"')
    if reduction.refuses(dtype):
        raise CallError(f"{op} over ranks", f"a {dtype} tensor", f"{op} has no exact meaning there", reduction.instead)


def reduce(terms: Sequence[Tensor], op: str) -> Tensor:
    """The reduction of the terms, first to last, in their own dtype; NaN propagates through max and min."""
    total = terms[0].clone(memory_format=torch.contiguous_format)
    if op in ("any", "all") and total.dtype != torch.bool:
        total.copy_(total != 0)
    combine = REDUCTIONS[op].combine
    for term in terms[1:]:
        combine(total, term)
    return total.div_(len(terms)) if op == "avg" else total
