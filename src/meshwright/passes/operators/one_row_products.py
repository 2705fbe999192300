"""Batched products of single rows with one matrix as one product, which reads the matrix once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from meshwright.graph import Edit, Rewriter, RulePass, Spot, Value, register_pass, register_rewrite

aten = torch.ops.aten


def _join_rows(edit: Edit, spot: Spot) -> str | None:
    """Replace bmm(x [b, 1, k], w [k, n] expanded to [b, k, n]) by mm(x [b, k], w)."""
    if spot.op is not aten.bmm.default:
        return None
    rows, expanded = spot.args[:2]
    maker = edit.producer(expanded)
    if maker is None or maker.op is not aten.expand.default or str(rows.shape[1]) != "1":
        return None
    matrix = maker.args[0]
    if not isinstance(matrix, Value) or len(matrix.shape) != 2:
        return None
    product = edit.add(aten.mm.default, edit.add(aten.squeeze.dim, rows, 1), matrix)
    edit.replace(edit.add(aten.unsqueeze.default, product, 1))
    return f"{matrix!r} is read once for {rows.shape[0]} rows"


# a rule finds each product by its first spelling
register_rewrite(Rewriter("rows of one matrix", _join_rows, on=(aten.matmul.default,)), into="one_row_products")


@register_pass
@dataclass(frozen=True)
class OneRowProducts(RulePass):
    """Replace a batched product of single rows with one expanded matrix by one product.

    `linear` of torch makes the batched product for rows of one token whose heads were transposed.
    """

    name: ClassVar[str] = "one_row_products"
