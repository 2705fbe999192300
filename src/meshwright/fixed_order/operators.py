"""Operators with sums in a fixed order, their sharding rules, and their local forms.

A sharded contraction is local up to the pieces of this rank. The sums of the ranks are gathered and added as the rest
of the tree, so the result is whole on every rank and no sum is pending.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from meshwright.layout import Dim, Layout, TorchValue, axes_of
from meshwright.spmd import LocalCall, Rule, register_rule
from meshwright.tensor import DistTensor, redistribute

from .kernels import accurate, pieces_of, tree
from .piece_products import product_of_blocks, product_of_pieces, runs_kernels
from .piece_sums import sum_of_pieces
from .torch_hooks import plain_calls

_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_LIBRARY.define("fixed_product(Tensor x, Tensor w, bool transposed, int pieces) -> Tensor")
_LIBRARY.define("fixed_batched_product(Tensor x, Tensor y) -> Tensor")
_LIBRARY.define("fixed_sum(Tensor x, int dim, int pieces) -> Tensor")
_LIBRARY.define("fixed_scatter(Tensor x, Tensor rows, int size, int pieces) -> Tensor")
_OPERATORS: TorchValue = torch.ops.meshwright
"""The operators. Tensors that kernels can read skip torch's dispatcher, which takes longer than a small sum."""


def product(x: Tensor, w: Tensor, transposed: bool = False, pieces: int | None = None) -> Tensor:
    """Return `x @ w` for a matrix `w`, or `x @ w.T` if it is transposed, without a gradient."""
    pieces = pieces_of(x.shape[-1]) if pieces is None else pieces
    if runs_kernels(x, w):
        with plain_calls():
            return _product(x, w, transposed, pieces)
    x, w = _aligned(pieces, (x, x.dim() - 1), (w, int(transposed)))
    return _OPERATORS.fixed_product(x, w, transposed, pieces)


def batched_product(x: Tensor, y: Tensor) -> Tensor:
    """Return `x @ y` for equal leading dims, without a gradient; the contraction is in blocks of 32."""
    if runs_kernels(x, y):
        with plain_calls():
            return product_of_blocks(x, y)
    return _OPERATORS.fixed_batched_product(x, y)


def total(x: Tensor, dim: int, pieces: int | None = None) -> Tensor:
    """Return the sum of `x` along `dim` without a gradient. With one piece, zeros at the end do not change it."""
    pieces = pieces_of(x.shape[dim]) if pieces is None else pieces
    if runs_kernels(x):
        with plain_calls():
            return _whole_sum(x, dim, pieces)
    (x,) = _aligned(pieces, (x, dim))
    return _OPERATORS.fixed_sum(x, dim, pieces)


def scatter(x: Tensor, rows: Tensor, size: int, pieces: int | None = None) -> Tensor:
    """Return a matrix of `size` rows; row r is the sum of those rows of `x` whose number in `rows` is r."""
    pieces = pieces_of(x.shape[0]) if pieces is None else pieces
    x, rows = _aligned(pieces, (x, 0), (rows, 0))
    return _OPERATORS.fixed_scatter(x, rows, size, pieces)


def settled(x: Tensor) -> Tensor:
    """Return `x` without pending sums."""
    if not isinstance(x, DistTensor) or not x.spec.layout.partial:
        return x
    return redistribute(x, x.mesh, Layout(x.spec.layout.dims))


def _aligned(pieces: int, *places: tuple[Tensor, int]) -> list[Tensor]:
    """Return the tensors, whole along these dims unless each rank has the same number of whole pieces."""
    dims = [(x.mesh, x.spec.layout.dims[d]) for x, d in places if isinstance(x, DistTensor)]
    axes = {a: mesh.sizes[a] for mesh, dim in dims for a in axes_of(dim)}
    if all(_is_contiguous(dim) for _, dim in dims) and pieces % prod(axes.values()) == 0:
        return [x for x, _ in places]
    return [_whole_along(x, d) for x, d in places]


def _is_contiguous(dim: Dim) -> bool:
    """True if each rank has one range of the dim."""
    if isinstance(dim, tuple):
        return True
    (_, _), *inner = dim.factors
    return not any(axes for _, axes in inner)


def _whole_along(x: Tensor, dim: int) -> Tensor:
    if not isinstance(x, DistTensor) or not axes_of(x.spec.layout.dims[dim]):
        return x
    dims = x.spec.layout.dims
    return redistribute(x, x.mesh, Layout((*dims[:dim], (), *dims[dim + 1 :])))


def _of_all_ranks(call: LocalCall, local: Tensor, operand: int, dim: int) -> Tensor:
    """Return the sum of the ranks' sums: the part of the tree that is above them."""
    count = call.ranks(operand, dim)
    if count == 1:
        return local
    every = call.gather_invariant(local.contiguous(), operand, dim)
    return tree(lambda rank: every[rank], 0, count)


def _product(x: Tensor, w: Tensor, transposed: bool, pieces: int) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = product_of_pieces(rows, w.t() if transposed else w, pieces)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _product_form(call: LocalCall, x: Tensor, w: Tensor, transposed: bool, pieces: int) -> Tensor:
    at = x.dim() - 1
    local = _product(x, w, transposed, pieces // call.ranks(0, at))
    return _of_all_ranks(call, local, 0, at).to(x.dtype)


def _product_rule(x: Tensor, w: Tensor, transposed: bool, pieces: int) -> Rule:
    text = f"... k, {'n k' if transposed else 'k n'} -> ... n"
    return Rule(text, over="sum", forms={"k": _product_form}, invariant=frozenset("k"))


def _sum(x: Tensor, dim: int, pieces: int) -> Tensor:
    return sum_of_pieces(accurate(x), dim, pieces)


def _whole_sum(x: Tensor, dim: int, pieces: int) -> Tensor:
    """Return the sum in memory of its own; a sum of one element would be a view, which programs may overwrite."""
    out = _sum(x, dim, pieces).to(x.dtype)
    return out.clone() if x.shape[dim] == 1 else out


def _sum_form(call: LocalCall, x: Tensor, dim: int, pieces: int) -> Tensor:
    local = _sum(x, dim, pieces // call.ranks(0, dim))
    return _of_all_ranks(call, local, 0, dim).to(x.dtype)


def _sum_rule(x: Tensor, dim: int, pieces: int) -> Rule:
    names = [f"d{at}" for at in range(x.dim())]
    left = " ".join(f"{name}!" if at == dim and pieces == 1 else name for at, name in enumerate(names))
    right = " ".join(name for at, name in enumerate(names) if at != dim)
    if pieces == 1:
        return Rule(f"{left}, -> {right}")
    return Rule(f"{left}, -> {right}", over="sum", forms={names[dim]: _sum_form}, invariant=frozenset([names[dim]]))


def _scatter(x: Tensor, rows: Tensor, size: int, pieces: int) -> Tensor:
    x, count = accurate(x), x.shape[0] // pieces

    def term(p: int) -> Tensor:
        here = slice(p * count, (p + 1) * count)
        return x.new_zeros(size, x.shape[1]).index_add_(0, rows[here], x[here])

    return tree(term, 0, pieces)


def _scatter_form(call: LocalCall, x: Tensor, rows: Tensor, size: int, pieces: int) -> Tensor:
    return _of_all_ranks(call, _scatter(x, rows, size, pieces // call.ranks(0, 0)), 0, 0).to(x.dtype)


def _scatter_rule(x: Tensor, rows: Tensor, size: int, pieces: int) -> Rule:
    return Rule("t d, t -> new d", over="sum", forms={"t": _scatter_form}, invariant=frozenset("t"))


def _register() -> None:
    whole = {
        "fixed_product": lambda x, w, transposed, pieces: _product(x, w, transposed, pieces).to(x.dtype),
        "fixed_batched_product": lambda x, y: product_of_blocks(x, y).to(x.dtype),
        "fixed_sum": _whole_sum,
        "fixed_scatter": lambda x, rows, size, pieces: _scatter(x, rows, size, pieces).to(x.dtype),
    }
    for name, local in whole.items():
        _LIBRARY.impl(name, local, "CompositeExplicitAutograd")
    register_rule("meshwright.fixed_product", _product_rule)
    register_rule("meshwright.fixed_batched_product", "... m k!, ... k! n -> ... m n")
    register_rule("meshwright.fixed_sum", _sum_rule)
    register_rule("meshwright.fixed_scatter", _scatter_rule)


_register()
