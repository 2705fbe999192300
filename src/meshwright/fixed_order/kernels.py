"""Sums and products of local tensors in an order that depends on global sizes only.

A sum over `n` elements has `pieces_of(n)` contiguous pieces. The sums of the pieces are added as one binary tree. The
elements of a piece are added as a tree of halves, which zeros at the end do not change. Additions of whole tensors are
elementwise, so neither other dims nor the memory order affect a bit.

A product calls torch's kernel for each piece of the contraction. Rows and columns are padded to multiples of 16, and
the contraction to a multiple of 32. Then each element of the result of torch's CPU kernels depends on its own row and
column only (`kernel_check`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS, CONTRACTED = 16, 32
"""Multiples to which rows and columns, and the contraction, are padded."""
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


def sum_of_pieces(x: Tensor, dim: int, pieces: int) -> Tensor:
    """Return the sum of `x` along `dim`, which has `pieces` pieces here."""
    size = x.shape[dim] // pieces
    return tree(lambda p: _halves(x.narrow(dim, p * size, size), dim), 0, pieces)


def _halves(x: Tensor, dim: int) -> Tensor:
    """Return the sum along `dim` as a tree: each level adds the second half of a power of two to the first."""
    n = x.shape[dim]
    if n == 0:
        return x.sum(dim)
    while n > 1:
        half = 1 << ((n - 1).bit_length() - 1)
        low, high = x.narrow(dim, 0, half), x.narrow(dim, half, n - half)
        both = low.narrow(dim, 0, n - half) + high
        x = both if n == 2 * half else torch.cat([both, low.narrow(dim, n - half, 2 * half - n)], dim)
        n = half
    return x.squeeze(dim)


def accurate(x: Tensor) -> Tensor:
    """Return `x` in float32 if it is in half precision, so that partial sums are not rounded."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def product_of_pieces(x: Tensor, w: Tensor, pieces: int) -> Tensor:
    """Return `x @ w`, for `x` (..., m, k) and `w` (..., k, n) of equal leading dims; k has `pieces` pieces here."""
    (m, k), n = x.shape[-2:], w.shape[-1]
    size = k // pieces
    rest = -size % CONTRACTED
    x, w = _padded(x, 0, -m % ROWS), _padded(w, -n % ROWS, 0)

    def term(p: int) -> Tensor:
        left = _padded(x.narrow(-1, p * size, size), rest, 0).contiguous()
        return accurate(left @ _padded(w.narrow(-2, p * size, size), 0, rest))

    return tree(term, 0, pieces)[..., :m, :n]


def _padded(x: Tensor, columns: int, rows: int) -> Tensor:
    return F.pad(x, (0, columns, 0, rows)) if columns or rows else x
