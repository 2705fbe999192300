"""Products: matmul and its family, einsum, linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _forms_grouped as grouped
from ._forms import LocalCall
from ._rule import Entry, Rule
from ._rules_dims import names_of, written


def matmul_rule(x: Tensor, y: Tensor) -> str:
    """A vector lends its one dim to the contraction; leading dims broadcast."""
    left = "k" if x.dim() == 1 else "... m k"
    right = "k" if y.dim() == 1 else "... k n"
    kept = f"{'' if x.dim() == 1 else 'm'} {'' if y.dim() == 1 else 'n'}"
    return f"{left} * {right} -> ... {kept}" if max(x.dim(), y.dim()) > 1 else "k * k ->"


def linear_rule(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str:
    """A weight of one dim makes a number of every row."""
    return "... k * n k + n -> ... n" if weight.dim() == 2 else "... k * k + ... -> ..."


def einsum_rule(equation: str, tensors: Sequence[Tensor], *, path: Any = None) -> str | None:
    """The equation is the rule; None where one operand has the same index twice."""
    text = equation.replace(" ", "")
    left, _, right = text.partition("->")
    terms = left.split(",")
    if any(len(set(t.replace("...", ""))) != len(t.replace("...", "")) for t in terms):
        return None
    if "->" not in text:
        letters = sorted(set(left) - set(",."))
        right = ("..." if "..." in left else "") + "".join(c for c in letters if left.count(c) == 1)
    if "..." in left and "..." not in right:
        return None
    return " * ".join(map(_spaced, terms)) + " -> " + _spaced(right)


def _spaced(term: str) -> str:
    """`b...ij` → `b ... i j`; capital letters are names of their own."""
    return " ".join("..." if c == "." else f"{c.lower()}{'C' if c.isupper() else ''}" for c in term.replace("...", "."))


def added(products: str, *result: str) -> Entry:
    """A product with a tensor added, which broadcasts to the result."""

    def entry(x: Tensor, *args: Any, **kwargs: Any) -> str:
        return f"{' '.join(result[len(result) - x.dim() :])} + {products} -> {' '.join(result)}"

    return entry


def inner_rule(x: Tensor, y: Tensor) -> str:
    if x.dim() == 0 or y.dim() == 0:
        return "... * ... -> ..."
    left, right = written(names_of(x, "a")[:-1]), written(names_of(y, "b")[:-1])
    return f"{left} k * {right} k -> {left} {right}"


def tensordot_rule(x: Tensor, y: Tensor, dims_x: Sequence[int], dims_y: Sequence[int]) -> str:
    left, right = names_of(x, "a"), names_of(y, "b")
    mine, theirs = [d % x.dim() for d in dims_x], [d % y.dim() for d in dims_y]
    for a, b in zip(mine, theirs, strict=True):
        right[b] = left[a]
    kept = [n for d, n in enumerate(left) if d not in mine] + [n for d, n in enumerate(right) if d not in theirs]
    return f"{written(left)} * {written(right)} -> {written(kept)}"


def cross_rule(x: Tensor, y: Tensor, *, dim: int = -1) -> str | None:
    if x.dim() != y.dim():
        return None
    names = written(names_of(x), (dim % x.dim(),))
    return f"{names} * {names} -> {names}"


def cross_anywhere_rule(x: Tensor, y: Tensor, dim: int | None = None) -> Rule | str | None:
    """Without a dim, along the first one of size three, which is another one where a piece has three rows."""
    if dim is not None or x.shape != y.shape or THREE not in x.shape:
        return None if dim is None else cross_rule(x, y, dim=dim)
    at = x.shape.index(THREE)

    def form(call: LocalCall, x: Tensor, y: Tensor, dim: None = None) -> Tensor:
        return torch.linalg.cross(x, y, dim=at)

    return Rule(cross_rule(x, y, dim=at) or "", forms={n: form for d, n in enumerate(names_of(x)) if d != at})


def grouped_rule(x: Tensor, w: Tensor, offs: Tensor | None = None, *rest: Any, **kwargs: Any) -> Rule:
    """Groups of rows, of columns or of what is summed over, as `offs` says where they end; or whole matrices.

    Matrices that are cut by group stay so: with all of them, every rank would make the products of all rows.
    """
    if offs is None:
        return Rule("b m k * b k n -> b m n", forms=dict.fromkeys("kmn", grouped.matrices_by_matrices))
    if w.dim() == 3:
        forms = dict.fromkeys("tken", grouped.rows_by_matrices)
        return Rule("t k * e k n | o! -> t n", forms=forms, stays=frozenset("e"))
    if x.dim() == 3:
        forms = dict.fromkeys("emkt", grouped.matrices_by_columns)
        return Rule("e m k * k t | o! -> m t", forms=forms, stays=frozenset("e"))
    return Rule("m t * t n | e! -> e m n", forms=dict.fromkeys("mtn", grouped.columns_by_rows))


THREE = 3
"""Size of the dim that a cross product is taken along."""

PRODUCT: dict[str, Entry] = {
    "aten.linear": linear_rule,
    "aten.matmul": matmul_rule,
    "aten.linalg_matmul": matmul_rule,
    "aten.mm": "m k * k n -> m n",
    "aten.bmm": "b m k * b k n -> b m n",
    "aten.mv": "m k * k -> m",
    "aten.dot": "k * k ->",
    "aten.vdot": "k * k ->",
    "aten.inner": inner_rule,
    "aten.outer": "m * n -> m n",
    "aten.ger": "m * n -> m n",
    "aten.addmm": added("m k * k n", "m", "n"),
    "aten.addbmm": added("b m k * b k n", "m", "n"),
    "aten.baddbmm": added("b m k * b k n", "b", "m", "n"),
    "aten.addmv": added("m k * k", "m"),
    "aten.addr": added("m * n", "m", "n"),
    "aten.einsum": einsum_rule,
    "aten.tensordot": tensordot_rule,
    "aten.linalg_cross": cross_rule,
    "aten._int_mm": "m k * k n -> m n",
    "aten._grouped_mm": grouped_rule,
}
