"""A pending sum passes an operator only if this is right for numbers that are not finite, and for large ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.spmd import REPLICATED, AxisState, BoundRule, Choice, choices

from .samples import build, samples
from .walker import Sample, results_of

RANKS = 2
NUMBERS = (inf, -inf, nan, 0.0, -0.0, 10.0, 0.5, 1e6, 1e-6)
TERMS = 2.0**17
"""Divisor of the largest number that gives a large term: every factor that lets a sum pass keeps such terms finite."""


def floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype.is_floating_point


def small(x: Tensor) -> Tensor:
    """Return integers, whose sums are exact."""
    return torch.randint(-3, 4, x.shape).to(x.dtype)


def poisoned(x: Tensor) -> Tensor:
    """Return integers, infinities, NaN and zeros."""
    bad = torch.tensor([inf, -inf, nan, 0.0, 0.0, 1.0, 2.0, -3.0], dtype=x.dtype)
    return bad[torch.randint(0, len(bad), x.shape)]


def terms_of(x: Tensor, large: bool) -> list[Tensor]:
    """Return terms of `x`: of both signs, and large ones that cancel."""
    other = torch.full_like(x, torch.finfo(x.dtype).max / TERMS) if large else 2 * x + 1
    return [x - other, other]


def pending_choices(bound: BoundRule, at: int) -> Iterator[Choice]:
    """Yield the choices of eager mode in which the operand stays a pending sum."""
    held: list[AxisState] = [REPLICATED] * len(bound.ins)
    held[at] = "sum"
    yield from (c for c in choices(bound, held) if c.ins[at] == "sum")


def part(x: Tensor | None, rank: int, is_pending: bool, held: AxisState, large: bool) -> Tensor | None:
    """Return the part of an operand on a rank."""
    if x is None:
        return None
    if is_pending:
        return terms_of(x, large)[rank]
    return torch.zeros_like(x) if held == "sum" and rank else x


def joined(sample: Sample, choice: Choice, operands: Sequence[Tensor | None], at: int, large: bool) -> list[Tensor]:
    """Return the results as sums over the ranks."""
    call = sample.described()
    assert call is not None
    found: list[list[Tensor]] = []
    for rank in range(RANKS):
        mine = [part(x, rank, i == at, choice.ins[i], large) for i, x in enumerate(operands)]
        args, kwargs = sample.arguments(call, mine)
        found.append(results_of(sample.op(*args, **kwargs)))
    return [first + second for first, second in zip(*found, strict=True)]


def check(sample: Sample, large: bool) -> int:
    """Compare every operand's pending sum with the whole value; return the number of comparisons."""
    call = sample.described()
    assert call is not None
    operands = sample.operands(call)
    done = 0
    for at in [i for i, x in enumerate(operands) if floating(x)]:
        made = [
            x if x is None or not floating(x) else small(x) if i == at else poisoned(x) for i, x in enumerate(operands)
        ]
        if large:
            made[at] = made[at] * 0  # pyright: ignore[reportOptionalOperand]
        for choice in pending_choices(call.bound, at):
            args, kwargs = sample.arguments(call, made)
            wanted = results_of(sample.op(*args, **kwargs))
            for mine, whole in zip(joined(sample, choice, made, at, large), wanted, strict=True):
                assert torch.equal(mine.isnan(), whole.isnan()), (
                    f"{sample.op} {call.rule.text!r} {choice}, operand {at}"
                )
                rounding = torch.finfo(torch.float64).max * 1e-15 if large else 1e-6
                torch.testing.assert_close(mine, whole, rtol=1e-6, atol=rounding, equal_nan=True)
            done += 1
    return done


def with_numbers(sample: Sample) -> Iterator[Sample]:
    """Yield the sample, and the sample with other values for each of its numbers."""
    yield sample
    for at, value in enumerate(sample.args):
        if type(value) in (int, float) and str(sample.op._schema.arguments[at].type) in ("number", "float"):
            for number in NUMBERS:
                yield replace(sample, args=(*sample.args[:at], number, *sample.args[at + 1 :]))
    for name in sample.kwargs.keys() & {"alpha", "beta", "value"}:
        for number in NUMBERS:
            yield replace(sample, kwargs={**sample.kwargs, name: number})


LINEAR = [(n, a) for n, a in samples() if (c := build(n, a).described()) is not None and c.bound.products]


@pytest.mark.parametrize("large", [False, True], ids=["not finite", "large"])
@pytest.mark.parametrize("packet", sorted({name.partition(".")[0] for name, _ in LINEAR}))
def test_pending_sums_give_the_numbers_of_the_sum(packet: str, large: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, arguments in LINEAR:
            if name.partition(".")[0] == packet:
                for sample in with_numbers(build(name, arguments)):
                    check(sample, large)


def test_additions_masks_and_small_factors_keep_a_sum_pending() -> None:
    """These keep the residual stream of a tensor-parallel model from being reduced more than once."""
    for name, arguments in [
        ("add.Tensor", "x(4), x(4)"),
        ("mul.Tensor", "x(4), b(4)"),
        ("mul.Scalar", "x(4), 0.125"),
        ("div.Scalar", "x(4), 8"),
        ("neg", "x(4)"),
        ("view", "x(4), [2, 2]"),
        ("where.self", "b(4), x(4), x(4)"),
        ("to.dtype", "f(4), torch.float64"),
        ("sum", "x(4)"),
        ("mean", "x(4)"),
        ("cat", "[x(4), x(4)]"),
        ("embedding", "x(4, 2), i(4, 3)"),
    ]:
        call = build(name, arguments).described()
        assert call is not None
        at = next(i for i, p in enumerate(call.places) if p is not None and (name != "where.self" or i))
        assert list(pending_choices(call.bound, at)), name
