"""Sums and products of local tensors in an order that depends on global sizes only.

A sum over `n` elements has `pieces_of(n)` contiguous pieces. The sums of the pieces are added as one binary tree. The
elements of a piece are added as a tree of halves, which zeros at the end do not change. Additions of whole tensors are
elementwise, so neither other dims nor the memory order affect a bit.

A product calls torch's kernel for each piece of the contraction. Rows and columns are padded to multiples of 16, and
the contraction to a multiple of 32 if the kernels need it. Then each element of the result of torch's CPU kernels
depends on its own row and column only (`kernel_check`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .kernel_check import CONTRACTED, ROWS, pads_contraction

MOST_PIECES = 8


def pieces_of(size: int) -> int:
    """Return the number of pieces of a sum: the largest power of two up to 8 that divides `size`.

    >>> [pieces_of(n) for n in (1, 12, 64, 7)]
    [1, 4, 8, 1]
    """
    pieces = MOST_PIECES
    while size % pieces:
        pieces //= 2
    return pieces


def tree(term: Callable[[int], Tensor], first: int, count: int) -> Tensor:
    """Return the sum of `term(first)` and the terms after it; the first half is the largest power of two below `count`.

    So a tree over a longer range whose further terms are zero has the same sum.
    """
    if count == 1:
        return term(first)
    half = 1 << ((count - 1).bit_length() - 1)
    return tree(term, first, half) + tree(term, first + half, count - half)


def plain_sum(x: Tensor, dim: int, pieces: int) -> Tensor:
    """Return the sum of `x` along `dim` by operators of torch; `dim` has `pieces` pieces here."""
    return _adjacent(_halves(x.unflatten(dim, (pieces, -1)), dim + 1), dim)


def _halves(x: Tensor, dim: int) -> Tensor:
    """Return the sum along `dim` as a tree: each level adds the second half of a power of two to the first."""
    n = x.shape[dim]
    if n == 0:
        return x.sum(dim)
    while n > 1:
        half = 1 << ((n - 1).bit_length() - 1)
        if n == 2 * half:
            low, high = x.split(half, dim)
            x = low + high
        else:
            low, alone, high = x.split([n - half, 2 * half - n, n - half], dim)
            x = torch.cat([low + high, alone], dim)
        n = half
    return x.squeeze(dim)


def accurate(x: Tensor) -> Tensor:
    """Return `x` in float32 if it is in half precision, so that partial sums are not rounded."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def plain_product(x: Tensor, w: Tensor, pieces: int) -> Tensor:
    """Return `x @ w` by torch's kernels, for `x` (..., m, k) and `w` (..., k, n) of equal leading dims.

    k has `pieces` pieces here.
    """
    (m, k), n = x.shape[-2:], w.shape[-1]
    size = k // pieces
    rest = -size % CONTRACTED if pads_contraction(x.device.type, x.dtype) else 0
    x, w = padded(x, 0, -m % ROWS), padded(w, -n % ROWS, 0)
    if x.dim() == 2 and m > FEW_ROWS:
        out = tree(lambda p: _piece(x, w, p * size, size, rest), 0, pieces)
    else:
        left = padded(x.unflatten(-1, (pieces, size)).transpose(-2, -3), rest, 0).contiguous()
        out = _adjacent(accurate(left @ padded(w.unflatten(-2, (pieces, size)), 0, rest)), x.dim() - 2)
    return out[..., :m, :n]


FEW_ROWS = 64
"""Rows up to which one batched call computes all pieces; it holds the products of all of them."""


def _piece(x: Tensor, w: Tensor, start: int, size: int, rest: int) -> Tensor:
    left = padded(x.narrow(1, start, size), rest, 0).contiguous()
    return accurate(left @ padded(w.narrow(0, start, size), 0, rest))


def _adjacent(x: Tensor, dim: int) -> Tensor:
    """Return the sum along `dim` in the order of `tree`: each level adds neighbours."""
    while (n := x.shape[dim]) > 1:
        paired = x.narrow(dim, 0, n - 1) if n % 2 else x
        low, high = paired.unflatten(dim, (-1, 2)).unbind(dim + 1)
        x = torch.cat([low + high, x.narrow(dim, n - 1, 1)], dim) if n % 2 else low + high
    return x.squeeze(dim)


def padded(x: Tensor, columns: int, rows: int) -> Tensor:
    """Return `x` with so many columns and rows of zeros behind its own."""
    return F.pad(x, (0, columns, 0, rows)) if columns or rows else x
