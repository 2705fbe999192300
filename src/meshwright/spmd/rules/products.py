"""Rules of products: matmul and related operators, einsum, linear layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from ..forms import grouped_products as grouped
from ..notation.dim_names import dim_names, operand_text
from ..notation.local_call import LocalCall
from ..notation.rule import Entry, Rule


def matmul_rule(x: Tensor, y: Tensor) -> str:
    """Return the rule of `matmul`: a vector has only the contracted dim; leading dims broadcast."""
    left = "k" if x.dim() == 1 else "... m k"
    right = "k" if y.dim() == 1 else "... k n"
    kept = f"{'' if x.dim() == 1 else 'm'} {'' if y.dim() == 1 else 'n'}"
    return f"{left} * {right} -> ... {kept}" if max(x.dim(), y.dim()) > 1 else "k * k ->"


def linear_rule(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str:
    """Return the rule of `linear`; a one-dim weight gives one number per row."""
    return "... k * n k + n -> ... n" if weight.dim() == 2 else "... k * k + ... -> ..."


def einsum_rule(equation: str, tensors: Sequence[Tensor], *, path: TorchValue = None) -> str | None:
    """Return the equation as a rule; None if an operand has an index twice, or `...` is summed."""
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
    """Return a term with spaces: `b ... i j` for `b...ij`. Capital letters become names such as `iC`."""
    return " ".join("..." if c == "." else f"{c.lower()}{'C' if c.isupper() else ''}" for c in term.replace("...", "."))


def with_addend(products: str, *result: str) -> Entry:
    """Return the rule of a product plus a tensor that broadcasts to the result."""

    def entry(x: Tensor, *args: TorchValue, **kwargs: TorchValue) -> str:
        return f"{' '.join(result[len(result) - x.dim() :])} + {products} -> {' '.join(result)}"

    return entry


def cross_rule(x: Tensor, y: Tensor, *, dim: int = -1) -> str | None:
    if x.dim() != y.dim():
        return None
    names = operand_text(dim_names(x), (dim % x.dim(),))
    return f"{names} * {names} -> {names}"


def cross_anywhere_rule(x: Tensor, y: Tensor, dim: int | None = None) -> Rule | str | None:
    """Return the rule of `cross`. Without `dim`, it works along the first global dim of size three.

    The form passes this dim, since a shard may have size three in an earlier dim.
    """
    if dim is not None or x.shape != y.shape or THREE_DIMS not in x.shape:
        return None if dim is None else cross_rule(x, y, dim=dim)
    at = x.shape.index(THREE_DIMS)

    def form(call: LocalCall, x: Tensor, y: Tensor, dim: None = None) -> Tensor:
        return torch.linalg.cross(x, y, dim=at)

    return Rule(cross_rule(x, y, dim=at) or "", forms={n: form for d, n in enumerate(dim_names(x)) if d != at})


def grouped_rule(x: Tensor, w: Tensor, offs: Tensor | None = None, *rest: TorchValue, **kwargs: TorchValue) -> Rule:
    """Return the rule of a grouped product: of groups of rows, columns or summed elements, or of whole matrices.

    `offs` has the ends of the groups. Matrices that are sharded by group stay sharded: with all of them, every rank
    would compute the products of all rows.
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


THREE_DIMS = 3
"""Size of the dim of a cross product."""

PRODUCT: dict[str, Entry] = {
    "aten.linear": linear_rule,
    "aten.matmul": matmul_rule,
    "aten.linalg_matmul": matmul_rule,
    "aten.mm": "m k * k n -> m n",
    "aten.bmm": "b m k * b k n -> b m n",
    "aten.mv": "m k * k -> m",
    "aten.dot": "k * k ->",
    "aten.vdot": "k * k ->",
    "aten.outer": "m * n -> m n",
    "aten.ger": "m * n -> m n",
    "aten.addmm": with_addend("m k * k n", "m", "n"),
    "aten.addbmm": with_addend("b m k * b k n", "m", "n"),
    "aten.baddbmm": with_addend("b m k * b k n", "b", "m", "n"),
    "aten.addmv": with_addend("m k * k", "m"),
    "aten.addr": with_addend("m * n", "m", "n"),
    "aten.einsum": einsum_rule,
    "aten.linalg_cross": cross_rule,
    "aten._int_mm": "m k * k n -> m n",
    "aten._grouped_mm": grouped_rule,
}
