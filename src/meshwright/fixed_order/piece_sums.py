"""Sums along a dim that is divided into pieces: by a C++ kernel, or by operators of torch with the same bits.

The kernel reads the operand once. It does the same additions, so it needs no check of torch's kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path

from torch import Tensor

from meshwright.tensor import native_kernel

from .kernels import plain_sum
from .piece_products import runs_kernels

_SOURCE = Path(__file__).with_name("piece_sums.cpp")
_Numbers = ctypes.c_int64 * 7


def sum_of_pieces(x: Tensor, dim: int, pieces: int) -> Tensor:
    """Return the sum of `x` along `dim`, which has `pieces` pieces here."""
    is_divisible = x.shape[dim] % pieces == 0  # if not, torch raises the error
    kernel = sum_kernel() if is_divisible and runs_kernels(x) else None
    return plain_sum(x, dim, pieces) if kernel is None else _run(kernel, x, dim, pieces)


@cache
def sum_kernel() -> Callable[..., None] | None:
    """Return the kernel; None without a compiler, and if kernels are off."""
    return native_kernel(_SOURCE, *[ctypes.c_void_p] * 3)


def _run(kernel: Callable[..., None], x: Tensor, dim: int, pieces: int) -> Tensor:
    at = dim % x.dim()
    outer, inner = x.shape[:at], x.shape[at + 1 :]
    out = x.new_empty((*outer, *inner))
    x = x.reshape(prod(outer), x.shape[at], prod(inner))
    numbers = _Numbers(*x.shape, *x.stride(), pieces)
    kernel(x.data_ptr(), out.data_ptr(), ctypes.addressof(numbers))
    return out
