"""Merging of reductions: a reduction moves after linear operators, up to a sum with another reduction.

    all_reduce(a) + all_reduce(b) = all_reduce(a + b),   f(all_reduce(a)) = all_reduce(f(a)) for linear f

A reduction sums the terms of all ranks. A linear operator that is equal on every rank may be applied to each term. This
defers the reductions of accumulated gradients to the end: one for all microbatches. Reductions do not move past casts:
a rounded sum differs from a sum of rounded terms, and wider terms are more bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch

from meshwright.graph import Change, Conversion, Draft, Pass, Program, Spot, Value, register_pass
from meshwright.reshard import AllGather, AllReduce, ReduceScatter
from meshwright.spmd import is_exact_factor

from .._rows import (
    has_equal_shards,
    has_static_sizes,
    have_equal_local_tensors,
    is_only_use,
    origin_text,
    received_bytes,
    sharded_rows_spec,
)

aten = torch.ops.aten
SUMS = {aten.add.Tensor, aten.sub.Tensor}
PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar}
QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}
SCALINGS = PRODUCTS | QUOTIENTS | {aten.neg.default}
MOVES = {
    aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten.reshape.default,
    aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.contiguous.default, aten.clone.default,
}  # fmt: skip
"""Operators that move elements without computing; they are linear."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """Result of a step after the linear operators `by`, in order."""

    step: Spot
    by: tuple[Spot, ...]

    @property
    def op(self) -> Conversion:
        assert isinstance(self.step.op, Conversion)
        return self.step.op

    @property
    def moves(self) -> bool:
        return any(spot.op in MOVES for spot in self.by)


@register_pass
@dataclass(frozen=True)
class Linear(Pass):
    """Replace the sum or difference of two all-reduces, reduce-scatters or gathers by one step on the total.

    Between a step and the sum, products with constants and operators that only move elements are allowed. Each step and
    operator must have no other reader, so that it can be removed.
    """

    name: ClassVar[str] = "linear"
    keeps_sums: ClassVar[bool] = True

    def run(self, program: Program) -> Program:
        draft = Draft(program)
        changes: list[Change] = []
        for spot in draft:
            found = _operands(draft, spot)
            if found is not None and _may_join(*found):
                changes.append(_join(draft, spot, *found))
        return draft.finish(*changes) if changes else program


def _operands(draft: Draft, spot: Spot) -> tuple[Reduced, Reduced] | None:
    """Return both operands of a sum of two tensors of one shape, if both come from steps; otherwise None."""
    if spot.op not in SUMS or any(isinstance(v, Value) for v in spot.kwargs.values()):
        return None
    a, b = spot.args[:2]
    if not (isinstance(a, Value) and isinstance(b, Value)) or a.sizes != b.sizes or a is b:
        return None
    if not a.dtype == b.dtype == spot.outs[0].dtype:
        return None
    left, right = _reduced(draft, a, spot), _reduced(draft, b, spot)
    return None if left is None or right is None else (left, right)


def _reduced(draft: Draft, v: Value, user: Spot) -> Reduced | None:
    """Return the step that `v` comes from, with the linear operators after it; None if there is none."""
    by: list[Spot] = []
    while is_only_use(draft, v, user):
        spot = draft.producer(v)
        if spot is None or not has_static_sizes(v):
            return None
        if isinstance(spot.op, Conversion):
            return Reduced(spot, tuple(reversed(by)))
        if not _is_linear(spot, v):
            return None
        by.append(spot)
        user, v = spot, spot.ins[0]
    return None


def _is_linear(spot: Spot, out: Value) -> bool:
    """True for a linear operator of one tensor, with constants that are equal on every rank."""
    if spot.op not in SCALINGS | MOVES or len(spot.ins) != 1 or not isinstance(spot.args[0], Value):
        return False
    if spot.kwargs and spot.op is not aten.clone.default:
        return False
    return spot.args[0].dtype == out.dtype and _keeps_terms(spot, out)


def _keeps_terms(spot: Spot, out: Value) -> bool:
    """False if a factor may make a term of a pending sum overflow."""
    if spot.op not in PRODUCTS | QUOTIENTS:
        return True
    factor: float = spot.args[1]
    if spot.op in QUOTIENTS:
        factor = 1 / factor if factor else inf
    return isinstance(out.dtype, torch.dtype) and is_exact_factor(factor, out.dtype)


def _may_join(a: Reduced, b: Reduced) -> bool:
    if a.op.step != b.op.step or a.op.src.mesh is not b.op.src.mesh or a.op.src.dtype != b.op.src.dtype:
        return False
    step = a.op.step
    if not isinstance(step, (AllReduce, ReduceScatter, AllGather)) or getattr(step, "op", "sum") not in ("sum", "avg"):
        return False
    if have_equal_local_tensors(a.op.src, b.op.src) and not a.moves and not b.moves:
        return True
    return isinstance(step, AllReduce) and has_equal_shards(a.op.src) and has_equal_shards(b.op.src)


def _join(draft: Draft, spot: Spot, a: Reduced, b: Reduced) -> Change:
    terms = [_unreduced(draft, side, spot) for side in (a, b)]
    total = draft.add(spot.op, *terms, *spot.args[2:], before=spot, origin=spot.origin, **spot.kwargs)
    keeps = have_equal_local_tensors(a.op.src, b.op.src) and not a.moves and not b.moves
    op = a.op if keeps else _of_shape(a.op, total)
    draft.replace(spot.outs[0], draft.add(op, total, before=spot, origin=spot.origin))
    for gone in (spot, *reversed(a.by), a.step, *reversed(b.by), b.step):
        draft.remove(gone)
    saved = received_bytes(a.op.step, a.op.src) + received_bytes(b.op.step, b.op.src) - received_bytes(op.step, op.src)
    return Change(
        "linear",
        f"two {a.op!r} merged into one, after their sum",
        origin_text(spot.origin),
        {"bytes": saved, "rounds": 1},
    )


def _unreduced(draft: Draft, side: Reduced, before: Spot) -> Value:
    """Apply the linear operators to the operand of the step, and return the result."""
    x = side.step.ins[0]
    for spot in side.by:
        x = draft.add(spot.op, x, *spot.args[1:], before=before, origin=spot.origin, **spot.kwargs)
    return x


def _of_shape(op: Conversion, x: Value) -> Conversion:
    """Return the all-reduce for local tensors with the shape of `x`."""
    step, src = op.step, op.src
    assert isinstance(step, AllReduce)
    shape = tuple(int(n) for n in x.shape)
    return replace(op, src=sharded_rows_spec(src.mesh, shape, src.dtype, step.axes, step.op))
