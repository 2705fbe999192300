"""The C++ kernel of products of few rows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from .native_kernel import native_kernel

_SOURCE = Path(__file__).with_name("row_products.cpp")
_VECTORS = {"AVX2", "AVX512"}
_TYPES = (*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 5)

Kernel = Callable[[int, int, int, int, int, int, int, int], None]
"""`kernel(x, w, out, m, n, k, stride of x, stride of w)` writes the product of x [m, k] and w [n, k] to out [m, n]."""


@cache
def row_kernel() -> Kernel | None:
    """Return the kernel; None without a compiler or without AVX2 or AVX-512, and if kernels are off."""
    if torch.backends.cpu.get_cpu_capability() not in _VECTORS:
        return None
    return native_kernel(_SOURCE, *_TYPES)
