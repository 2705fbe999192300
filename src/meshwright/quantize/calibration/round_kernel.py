"""The C++ kernel that rounds a block of columns by GPTQ, with the bits of torch's operators."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from meshwright.tensor import native_kernel

from .._rounding import code_range
from .._scheme import NumberFormat

_SOURCE = Path(__file__).with_name("round_block.cpp")
_TYPES = (*[ctypes.c_void_p] * 6, *[ctypes.c_int64] * 6)


@cache
def round_kernel() -> Callable[..., None] | None:
    """Return the kernel; None without a compiler, and if kernels are off."""
    return native_kernel(_SOURCE, *_TYPES)


def fits_kernel(x: Tensor, numbers: NumberFormat) -> bool:
    """True for float32 numbers in memory that are rounded to integers."""
    return x.is_cpu and type(x) is Tensor and x.dtype is torch.float32 and numbers.type == "int"


def run_block(
    kernel: Callable[..., None],
    left: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    upper: Tensor,
    numbers: NumberFormat,
) -> Tensor:
    """Round a block of columns, the rows of `left` [b, n], with the factor [b, b]; return their errors [b, n]."""
    upper = upper.contiguous()  # factors of LAPACK have their columns in memory
    errors = torch.empty(left.shape, dtype=left.dtype, device=left.device)
    zeros = 0 if zero is None else zero.data_ptr()
    pointers = (left.data_ptr(), codes.data_ptr(), scale.data_ptr(), zeros, upper.data_ptr(), errors.data_ptr())
    kernel(*pointers, *left.shape, left.stride(0), upper.stride(0), *code_range(numbers))
    return errors
