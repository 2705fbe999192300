"""Values computed piece by piece, each a group of rows.

Some operators compute each row of a result from the same row of their operands: products whose left operand has the
rows, pointwise operators, reductions over the last dim, and normalizations. From pieces of the operands they compute
pieces of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from meshwright.graph import Draft, Op, Spot, Value, is_pure, values_in
from meshwright.layout import TorchValue

from .._rows import has_static_sizes

aten = torch.ops.aten
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
PRODUCTS: dict[Op, int] = {aten.mm.default: 0, aten.addmm.default: 1}
"""Product → position of the operand that has the rows."""
REDUCTIONS = {aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.logsumexp.default}
NORMALIZATIONS = {aten.native_layer_norm.default, aten._fused_rms_norm.default}
CASTS = {aten._to_copy.default}
Pieces = tuple[Value, ...]


@dataclass(slots=True)
class RowPieces:
    """Values of a draft in `count` pieces: matrices that have the same numbers of rows."""

    draft: Draft
    count: int
    known: dict[Value, Pieces] = field(default_factory=dict[Value, Pieces])

    def has_product(self, v: Value) -> bool:
        """True if `v` is computed from a product by operators that compute each row alone."""
        made = self.draft.producer(v)
        if made is None or not has_static_sizes(*made.ins, *made.outs):
            return False
        if is_row_product(made):
            return True
        with_rows = made.ins if made.op in VIEWS else [x for x in made.ins if _has_rows_of(x, v)]
        return _keeps_rows(made, v) and any(map(self.has_product, with_rows))

    def compute(self, v: Value) -> None:
        """Compute `v` piece by piece, and before it the values between the next products and `v`."""
        made = self.draft.producer(v)
        if v in self.known or made is None or not self.has_product(v):
            return
        if is_row_product(made):
            self._replace(made, [made.args[PRODUCTS[made.op]]])
            return
        for x in made.ins:
            self.compute(x)
        self.continue_with(made)

    def before_products(self) -> set[Spot]:
        """Return products, and the operators from which only operators on rows lead to one of them."""
        wanted: set[Spot] = set()
        for spot in reversed(list(self.draft)):
            readers = (reader for v in spot.outs for reader in self.draft.users(v))
            if is_row_product(spot) or (_computes_rows(spot) and any(reader in wanted for reader in readers)):
                wanted.add(spot)
        return wanted

    def continue_with(self, spot: Spot) -> bool:
        """Compute an operator by pieces, if pieces of its rows are known; views need no operator."""
        known = [v for v in spot.ins if v in self.known]
        if not known or not has_static_sizes(*spot.ins, *spot.outs):
            return False
        if is_row_product(spot):
            left = spot.args[PRODUCTS[spot.op]]
            return known == [left] and spot.ins.count(left) == 1 and self._replace(spot, known)
        if not _keeps_rows(spot, known[0]):
            return False
        if spot.op in VIEWS:
            self.known[spot.outs[0]] = self.known[known[0]]
            return False
        return self._replace(spot, [v for v in spot.ins if _has_rows_of(v, known[0])])

    def pieces_of(self, v: Value, reader: Spot) -> Pieces:
        """Return the pieces of an operand of `reader`; a value that is not computed by pieces is split."""
        if v not in self.known:
            rows = self._add(reader, aten.reshape.default, v, [-1, v.shape[-1]])
            sizes = [prod(_leading(v)) // self.count] * self.count
            self.known[v] = tuple(self._add(reader, aten.split_with_sizes.default, rows, sizes, 0))
        return self.known[v]

    def put_together(self, pieces: Pieces, shape: Sequence[Any], before: Spot) -> Value:
        """Return the value of this shape that consists of these rows."""
        whole = self._add(before, aten.cat.default, list(pieces), 0)
        found = self._add(before, aten.view.default, whole, list(shape))
        self.known[whole] = self.known[found] = pieces
        return found

    def _replace(self, spot: Spot, cut: Sequence[Value]) -> bool:
        """Replace an operator by one for each piece of the operands `cut`, whose results are put together."""
        parts = {v: self.pieces_of(v, spot) for v in cut}
        made = [self._of_piece(spot, {v: each[at] for v, each in parts.items()}) for at in range(self.count)]
        for out, pieces in zip(spot.outs, zip(*made, strict=True), strict=True):
            self.draft.replace(out, self.put_together(pieces, out.shape, spot))
        self.draft.remove(spot)
        return True

    def _of_piece(self, spot: Spot, parts: dict[Value, Value]) -> Pieces:
        args = [parts.get(a, a) if isinstance(a, Value) else a for a in spot.args]
        if spot.op in REDUCTIONS:
            args[1] = [-1]
        return tuple(values_in(self.draft.add(spot.op, *args, before=spot, origin=spot.origin, **spot.kwargs)))

    def _add(self, before: Spot, op: Op, *args: TorchValue) -> TorchValue:
        return self.draft.add(op, *args, before=before, origin=before.origin)


def is_row_product(spot: Spot) -> bool:
    """True for a product each of whose rows depends on one row of its left operand only; a bias has no rows."""
    return spot.op in PRODUCTS and all(len(v.shape) == 1 for v in spot.args[: PRODUCTS[spot.op]])


def _leading(v: Value) -> tuple[Any, ...]:
    return tuple(v.shape[:-1])


def _has_rows_of(v: Value, like: Value) -> bool:
    """True if the value has a row for each row of `like`."""
    return len(v.shape) > 1 and _leading(v) == _leading(like)


def _keeps_rows(spot: Spot, like: Value) -> bool:
    """True if operands and results have the rows of `like`; operands may also be the same for all rows."""
    if not _computes_rows(spot):
        return False
    if spot.op in VIEWS:
        return True
    shared = [v for v in spot.ins if len(v.shape) < 2 or (len(v.shape) == 2 and v.shape[0] == 1)]
    return all(_has_rows_of(v, like) for v in (*spot.outs, *(v for v in spot.ins if v not in shared)))


def _computes_rows(spot: Spot) -> bool:
    """True for a view that keeps the last dim, and for an operator that may compute each row alone."""
    if not is_pure(spot.op) or any(isinstance(x, Value) for x in spot.kwargs.values()):
        return False
    if spot.op in VIEWS:
        return spot.ins[0].shape[-1:] == spot.outs[0].shape[-1:]
    if spot.op in REDUCTIONS:
        return _keeps_last_dim(spot)
    if spot.op in NORMALIZATIONS:
        return len(spot.args[1]) == 1
    return spot.op in CASTS or torch.Tag.pointwise in getattr(spot.op, "tags", ())


def _keeps_last_dim(reduction: Spot) -> bool:
    """True for a reduction over the last dim alone, which stays as a dim of size 1."""
    dims, keeps = (*reduction.args[1:3], None, None)[:2]
    count = len(reduction.ins[0].shape)
    return keeps is True and isinstance(dims, (list, tuple)) and [d % count for d in dims] == [count - 1]
