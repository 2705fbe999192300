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

from meshwright.graph import Change, Conversion, Draft, Pass, Program, RewriteError, Spot, Value, register_pass
from meshwright.reshard import AllReduce

from .._rows import has_equal_shards, has_static_sizes, origin_text, row_spec
from .row_pieces import RowPieces

aten = torch.ops.aten


@register_pass
@dataclass(frozen=True)
class SplitProducts(Pass):
    """Split matrix products that an all-reduce of at least `least` bytes reads into `pieces` by rows.

    Operators between the product and the all-reduce that compute each row alone are split as well, and so are those
    between the all-reduce and the next products: they run on the first piece while the last one is sent. Products whose
    number of rows is no multiple of `pieces` stay whole. The pass must run after `Bucket`, which would merge the pieces
    again, and before `OverlapSchedule`.

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
        rows = RowPieces(draft, self.pieces)
        found = {spot for spot in draft if self._fits(rows, spot)}
        if not found:
            return program
        wanted, changes, count = rows.before_products(), list[Change](), 0
        for spot in list(draft):
            if spot in found:
                changes.append(self._split_step(rows, spot))
            elif spot in wanted and not spot.gone:
                count += rows.continue_with(spot)
        return draft.finish(*changes, *self._continued(count))

    def _continued(self, count: int) -> list[Change]:
        what = f"{count} operators after these sums in {self.pieces} pieces"
        return [Change(self.name, what, "")] if count else []

    def _fits(self, rows: RowPieces, spot: Spot) -> bool:
        """True for a large all-reduce of a value whose rows come from a product, and can be split evenly."""
        if (
            not isinstance(spot.op, Conversion)
            or not isinstance(spot.op.step, AllReduce)
            or not has_equal_shards(spot.op.src)
        ):
            return False
        (x,) = spot.ins
        if len(x.shape) < 2 or not has_static_sizes(x) or x.nbytes < self.least or prod(x.shape[:-1]) % self.pieces:
            return False
        return rows.has_product(x)

    def _split_step(self, rows: RowPieces, step: Spot) -> Change:
        rows.compute(step.ins[0])
        (x,) = step.ins
        sent = tuple(_reduced_piece(rows.draft, step, part) for part in rows.pieces_of(x, step))
        rows.draft.replace(step.outs[0], rows.put_together(sent, x.shape, step))
        rows.draft.remove(step)
        return Change(self.name, f"{step.op!r} of {list(x.shape)} in {self.pieces} pieces", origin_text(step.origin))


def _reduced_piece(draft: Draft, step: Spot, part: Value) -> Value:
    """Return the piece after its all-reduce."""
    assert isinstance(step.op, Conversion)
    assert isinstance(step.op.step, AllReduce)
    reduction, src = step.op.step, step.op.src
    flat = draft.add(aten.view.default, part, [-1], before=step, origin=step.origin)
    carry = Conversion(reduction, row_spec(src.mesh, prod(part.shape), src.dtype, reduction.axes, reduction.op))
    out = draft.add(carry, flat, before=step, origin=step.origin)
    return draft.add(aten.view.default, out, list(part.shape), before=step, origin=step.origin)
