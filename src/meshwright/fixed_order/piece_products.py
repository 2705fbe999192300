"""Products whose contraction is divided into pieces: by a C++ kernel, or by torch's kernel for each piece.

The kernel reads each operand once, and holds the sums of the pieces in registers. It is used for contractions in pieces
up to a length for which it has the bits of torch's kernels on this processor (`longest_piece`). So the results are the
same where there is no compiler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from meshwright.tensor import (
    has_values,
    in_capture,
    jit_tracing,
    modes_active,
    modes_before_dispatch,
    native_kernel,
    parts_recorded,
    transforming,
)

from .kernel_check import CONTRACTED, is_separable
from .kernels import accurate, padded, plain_product

_SOURCE = Path(__file__).with_name("piece_products.cpp")
_LONGEST = (192, 128, 64, CONTRACTED)
"""Lengths of pieces, up to the longest one that MKL adds up in one chain."""
_SHORTEST = 2
"""A piece of one element is no sum: it may be -0, and a sum that begins with 0 may not."""
_LENGTHS = (_SHORTEST, 5, 12, 43, CONTRACTED, 60)
"""Lengths of further pieces that are compared."""
_SHAPES = ((16, 16), (48, 96), (112, 384))
"""Rows and columns of the products that are compared."""


def product_of_pieces(x: Tensor, w: Tensor, pieces: int) -> Tensor:
    """Return `x @ w`, for `x` (..., m, k) and `w` (..., k, n) of equal leading dims; k has `pieces` pieces here.

    The result is in float32 if the operands are in half precision.
    """
    if not is_separable(x.device.type, x.dtype):
        x, w = accurate(x), accurate(w)
    found = _by_kernel(x, w, x.shape[-1] // pieces) if x.shape[-1] % pieces == 0 else None
    return plain_product(x, w, pieces) if found is None else found


def product_of_blocks(x: Tensor, w: Tensor) -> Tensor:
    """Return `x @ w` for equal leading dims, in blocks of 32 of the contraction; zeros at its end do not change it."""
    if not is_separable(x.device.type, x.dtype):
        x, w = accurate(x), accurate(w)
    found = _by_kernel(x, w, CONTRACTED)
    if found is not None:
        return found
    blocks = -(-x.shape[-1] // CONTRACTED)
    rest = blocks * CONTRACTED - x.shape[-1]
    return plain_product(padded(x, rest, 0), padded(w, 0, rest), blocks)


def _by_kernel(x: Tensor, w: Tensor, size: int) -> Tensor | None:
    """Return the product in pieces of `size` elements, the last one maybe shorter; None if torch computes it."""
    if not runs_kernels(x, w) or not _SHORTEST <= size <= longest_piece():
        return None
    if x.shape[-1] != w.shape[-2] or x.shape[:-2] != w.shape[:-2]:  # torch raises the error
        return None
    kernel = product_kernel()
    return None if kernel is None else _run(kernel, x, w, size)


def runs_kernels(*operands: Tensor) -> bool:
    """True if kernels of this package can read the operands; torch does not see such a call, and it has one thread."""
    if torch.get_num_threads() > 1 or _is_seen():
        return False
    return all(has_values(x) and x.numel() for x in operands)


def _is_seen() -> bool:
    """True if the operators of this thread are recorded or transformed."""
    if in_capture() or parts_recorded() or modes_active() or modes_before_dispatch():
        return True
    return transforming() or jit_tracing() or torch.compiler.is_compiling()


@cache
def product_kernel() -> Callable[..., None] | None:
    """Return the kernel; None without a compiler, if kernels are off, and on processors other than those with AVX2.

    On others, such as those with AVX-512, its bits were never compared with those of torch's kernels for all shapes.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return None
    return native_kernel(_SOURCE, *[ctypes.c_void_p] * 4)


_Numbers = ctypes.c_int64 * 14


def _run(kernel: Callable[..., None], x: Tensor, w: Tensor, size: int) -> Tensor:
    (m, k), n = x.shape[-2:], w.shape[-1]
    out = x.new_empty(*x.shape[:-1], n)
    if x.dim() > 4:
        x, w = x.flatten(0, -4), w.flatten(0, -4)
    absent = 4 - x.dim()
    leading = (1,) * absent + x.shape[:-2]
    strides = (0,) * absent + x.stride() + (0,) * absent + w.stride()
    numbers = _Numbers(m, n, k, size, *leading, *strides)
    kernel(x.data_ptr(), w.data_ptr(), out.data_ptr(), ctypes.addressof(numbers))
    return out


@cache
def longest_piece() -> int:
    """Return the longest piece for which the kernel has the bits of torch's kernels; 0 if there is none.

    The first call compiles the kernel. It must be outside a capture, where products are fake.
    """
    kernel = product_kernel()
    if kernel is None or not all(_is_equal(kernel, size) for size in _LENGTHS):
        return 0
    return next((size for size in _LONGEST if _is_equal(kernel, size)), 0)


def _is_equal(kernel: Callable[..., None], size: int) -> bool:
    """True if products in pieces of this size, from the kernel and from torch, have the same bits."""
    pairs = (pair for m, n in _SHAPES for pair in _operands(m, 3 * size, n))
    return all(torch.equal(_run(kernel, x, w, size), plain_product(x, w, 3)) for x, w in pairs)


def _operands(m: int, k: int, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield operands of a product, in each memory order."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    x = torch.randn(m, k, generator=generator, device="cpu", dtype=torch.float32)
    w = torch.randn(k, n, generator=generator, device="cpu", dtype=torch.float32)
    yield x, w
    yield x, w.t().contiguous().t()
    yield x.t().contiguous().t(), w
    yield torch.stack([x, -x]), torch.stack([w, w])
