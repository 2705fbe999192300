"""Splitting of matrix products before an all-reduce: each piece is sent while the next one is computed.

Rows of a product do not depend on each other, so a product can be computed by groups of rows. This pays off if
collectives overlap with operators: `OverlapSchedule` starts the collective of each piece as soon as the piece is
available.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch

from meshwright.graph import Change, Conversion, Draft, Op, Pass, Program, RewriteError, Spot, Value, register_pass
from meshwright.layout import TorchValue
from meshwright.reshard import AllReduce

from .._rows import has_equal_shards, has_static_sizes, is_only_use, origin_text, row_spec

aten = torch.ops.aten
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


@register_pass
@dataclass(frozen=True)
class SplitProducts(Pass):
    """Split matrix products that an all-reduce of at least `least` bytes reads into `pieces` by rows.

    Sums with such products are split as well. A product with other readers is not split, nor one whose number of rows
    is no multiple of `pieces`. The pass must run after `Bucket`, which would merge the pieces again, and before
    `OverlapSchedule`.

    Raises:
        RewriteError: `pieces` is less than two.
    """

    name: ClassVar[str] = "split_products"
    pieces: int = 2
    least: int = 2**20

    def __post_init__(self) -> None:
        if self.pieces < 2:
            raise RewriteError(
                repr(self), f"{self.pieces} pieces", "one piece is the whole product", "write SplitProducts(pieces=2)"
            )

    def run(self, program: Program) -> Program:
        draft = Draft(program)
        found = [spot for spot in draft if self._fits(draft, spot)]
        changes = [self._split_step(draft, spot) for spot in found]
        return draft.finish(*changes) if changes else program

    def _fits(self, draft: Draft, spot: Spot) -> bool:
        """True for a large all-reduce of a product, or of a sum with one, whose rows can be split evenly."""
        if (
            not isinstance(spot.op, Conversion)
            or not isinstance(spot.op.step, AllReduce)
            or not has_equal_shards(spot.op.src)
        ):
            return False
        (x,) = spot.ins
        if len(x.shape) < 2 or not has_static_sizes(x) or x.nbytes < self.least or prod(x.shape[:-1]) % self.pieces:
            return False
        return _has_product(draft, x, spot)

    def _split_step(self, draft: Draft, step: Spot) -> Change:
        (x,), origin = step.ins, step.origin
        rows = _Rows(draft, step, self.pieces, (prod(x.shape[:-1]) // self.pieces, x.shape[-1]))
        sent = [_reduced_piece(draft, step, part) for part in rows.pieces_of(x, step)]
        whole = draft.add(aten.cat.default, sent, 0, before=step, origin=origin)
        draft.replace(step.outs[0], draft.add(aten.view.default, whole, list(x.shape), before=step, origin=origin))
        draft.remove(step)
        return Change(self.name, f"{step.op!r} of {list(x.shape)} in {self.pieces} pieces", origin_text(origin))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Builder of values as matrices in pieces of rows, before `step`; `shape` is the shape of a piece."""

    draft: Draft
    step: Spot
    pieces: int
    shape: tuple[int, int]

    def pieces_of(self, v: Value, reader: Spot) -> list[Value]:
        """Return the pieces of the operand `v` of `reader`. Products and sums are computed piece by piece."""
        made = self.draft.producer(v)
        if made is None or not is_only_use(self.draft, v, reader):
            return self._cut(v)
        if made.op is aten.mm.default:
            x, w = made.args
            return [self._add(aten.mm.default, part, w) for part in self._split(x)]
        if made.op in VIEWS and made.ins[0].shape[-1:] == v.shape[-1:]:
            return self.pieces_of(made.ins[0], made)
        if _is_sum(made):
            both = (self.pieces_of(a, made) for a in made.args)
            return [self._add(aten.add.Tensor, a, b) for a, b in zip(*both, strict=True)]
        return self._cut(v)

    def _cut(self, v: Value) -> list[Value]:
        return self._split(self._add(aten.reshape.default, v, [-1, self.shape[1]]))

    def _split(self, x: Value) -> list[Value]:
        return list(self._add(aten.split_with_sizes.default, x, [self.shape[0]] * self.pieces, 0))

    def _add(self, op: Op, *args: TorchValue) -> TorchValue:
        return self.draft.add(op, *args, before=self.step, origin=self.step.origin)


def _has_product(draft: Draft, v: Value, reader: Spot) -> bool:
    """True if `_Rows.pieces_of` would compute a product piece by piece."""
    made = draft.producer(v)
    if made is None or not is_only_use(draft, v, reader):
        return False
    if made.op in VIEWS and made.ins[0].shape[-1:] == v.shape[-1:]:
        return _has_product(draft, made.ins[0], made)
    return made.op is aten.mm.default or (_is_sum(made) and any(_has_product(draft, a, made) for a in made.args))


def _is_sum(spot: Spot) -> bool:
    """True for the sum of two tensors of one shape and dtype."""
    if spot.op is not aten.add.Tensor or spot.kwargs or not all(isinstance(a, Value) for a in spot.args):
        return False
    a, b = spot.args
    return a.sizes == b.sizes and a.dtype == b.dtype


def _reduced_piece(draft: Draft, step: Spot, part: Value) -> Value:
    """Return the piece after its all-reduce."""
    assert isinstance(step.op, Conversion)
    assert isinstance(step.op.step, AllReduce)
    reduction, src = step.op.step, step.op.src
    flat = draft.add(aten.view.default, part, [-1], before=step, origin=step.origin)
    carry = Conversion(reduction, row_spec(src.mesh, prod(part.shape), src.dtype, reduction.axes, reduction.op))
    out = draft.add(carry, flat, before=step, origin=step.origin)
    return draft.add(aten.view.default, out, list(part.shape), before=step, origin=step.origin)
