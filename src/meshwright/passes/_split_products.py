"""A product whose terms are added up over ranks is made in pieces, each of which is on its way while the next is made.

Rows of a product do not depend on each other, so a product of some rows is those rows of the product. It is worth
something where a collective works on the side: `Schedule` begins each piece's as soon as it is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch

from meshwright.graph import Carry, Change, Draft, Op, Pass, Program, RewriteError, Spot, Value, register_pass
from meshwright.reshard import AllReduce

from ._rows import is_even, is_known, is_only_use, place, row

aten = torch.ops.aten
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


@register_pass
@dataclass(frozen=True)
class SplitProducts(Pass):
    """Products behind which an all-reduce of `least` bytes or more stands are made in `pieces`, by rows.

    A sum of products, or of a product and something else, is made in pieces with them. Those whose rows are no multiple
    of `pieces`, or which something else reads too, stay whole. It comes
    behind `Bucket`, which would put the pieces together again, and before `Schedule`.
    """

    name: ClassVar[str] = "split_products"
    pieces: int = 2
    least: int = 2**20

    def __post_init__(self) -> None:
        if self.pieces < 2:
            raise RewriteError(
                repr(self), f"{self.pieces} pieces", "one piece is the product as it is", "SplitProducts(pieces=2)"
            )

    def run(self, program: Program) -> Program:
        draft = Draft(program)
        found = [spot for spot in draft if self._fits(draft, spot)]
        changes = [self._apart(draft, spot) for spot in found]
        return draft.finish(*changes) if changes else program

    def _fits(self, draft: Draft, spot: Spot) -> bool:
        """True for an all-reduce of a product, or of what is a sum with one, of as many rows as have pieces."""
        if not isinstance(spot.op, Carry) or not isinstance(spot.op.step, AllReduce) or not is_even(spot.op.src):
            return False
        (x,) = spot.ins
        if len(x.shape) < 2 or not is_known(x) or x.nbytes < self.least or prod(x.shape[:-1]) % self.pieces:
            return False
        return _has_product(draft, x, spot)

    def _apart(self, draft: Draft, step: Spot) -> Change:
        (x,), origin = step.ins, step.origin
        rows = _Rows(draft, step, self.pieces, (prod(x.shape[:-1]) // self.pieces, x.shape[-1]))
        sent = [_sent(draft, step, part) for part in rows.of(x, step)]
        whole = draft.add(aten.cat.default, sent, 0, before=step, origin=origin)
        draft.replace(step.outs[0], draft.add(aten.view.default, whole, list(x.shape), before=step, origin=origin))
        draft.remove(step)
        return Change(self.name, f"{step.op!r} of {list(x.shape)} in {self.pieces} pieces", place(origin))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Values as matrices, in pieces of some rows each, made before `step`; `shape` is that of a piece."""

    draft: Draft
    step: Spot
    pieces: int
    shape: tuple[int, int]

    def of(self, v: Value, reader: Spot) -> list[Value]:
        """The pieces of what `reader` reads: products and sums are made piece by piece."""
        made = self.draft.producer(v)
        if made is None or not is_only_use(self.draft, v, reader):
            return self._cut(v)
        if made.op is aten.mm.default:
            x, w = made.args
            return [self._add(aten.mm.default, part, w) for part in self._split(x)]
        if made.op in VIEWS and made.ins[0].shape[-1:] == v.shape[-1:]:
            return self.of(made.ins[0], made)
        if _is_sum(made):
            both = (self.of(a, made) for a in made.args)
            return [self._add(aten.add.Tensor, a, b) for a, b in zip(*both, strict=True)]
        return self._cut(v)

    def _cut(self, v: Value) -> list[Value]:
        return self._split(self._add(aten.reshape.default, v, [-1, self.shape[1]]))

    def _split(self, x: Value) -> list[Value]:
        return list(self._add(aten.split_with_sizes.default, x, [self.shape[0]] * self.pieces, 0))

    def _add(self, op: Op, *args: Any) -> Any:
        return self.draft.add(op, *args, before=self.step, origin=self.step.origin)


def _has_product(draft: Draft, v: Value, reader: Spot) -> bool:
    """True where a product would be made piece by piece."""
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


def _sent(draft: Draft, step: Spot, part: Value) -> Value:
    """The part, added up over the ranks."""
    assert isinstance(step.op, Carry)
    assert isinstance(step.op.step, AllReduce)
    how, src = step.op.step, step.op.src
    flat = draft.add(aten.view.default, part, [-1], before=step, origin=step.origin)
    carry = Carry(how, row(src.mesh, prod(part.shape), src.dtype, how.axes, how.op))
    out = draft.add(carry, flat, before=step, origin=step.origin)
    return draft.add(aten.view.default, out, list(part.shape), before=step, origin=step.origin)
