"""The C++ kernels of products with codes. Processors without AVX2 and machines without a compiler have none."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from meshwright.tensor import native_kernel

from .._rounding import FLOAT4_NUMBERS, FLOAT8, NORMAL_FLOAT4

_FOLDER = Path(__file__).parent
_VECTORS = {"AVX2", "AVX512"}
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_SMALLEST_PART = 2**17
"""Fewest codes for which a thread of its own is worth its start."""
SIGNED_BYTES, TABLE, FLOATS = 9, 10, 11
"""Forms of codes in the kernel, beside the numbers of bits of packed integers."""

Kernel = Callable[..., None]


@cache
def packed_kernel() -> Kernel | None:
    """Return the kernel of products with packed codes, or None."""
    return _kernel("packed_products", *[_POINTER] * 6, *[_NUMBER] * 10)


@cache
def integer_kernel() -> Kernel | None:
    """Return the kernel of products of int8 codes, or None."""
    return _kernel("integer_products", *[_POINTER] * 3, *[_NUMBER] * 5)


def _kernel(name: str, *types: type) -> Kernel | None:
    if torch.backends.cpu.get_cpu_capability() not in _VECTORS:
        return None
    return native_kernel(_FOLDER / f"{name}.cpp", *types)


def run_packed(kernel: Kernel, x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, form: int) -> Tensor:
    """Return the product of x [m, k] with stored codes of n rows, whose scales are [n, g] or [1]; all in float32."""
    (m, k), n = x.shape, codes.shape[0]
    groups = scale.shape[1] if scale.dim() == 2 else 1
    stride = groups if scale.dim() == 2 else 0
    out = x.new_empty(m, n)
    table = _tables()[codes.dtype == torch.uint8].data_ptr() if form == TABLE else 0
    zeros = 0 if zero is None else zero.data_ptr()
    pointers = (x.data_ptr(), codes.data_ptr(), scale.data_ptr(), zeros, table, out.data_ptr())
    row_bytes = codes.shape[1] * codes.element_size()
    sizes = (form, m, n, k, k, row_bytes, stride, groups)
    _in_parts(lambda first, last: kernel(*pointers, *sizes, first, last), n, n * k)
    return out


def run_integers(kernel: Kernel, x: Tensor, w: Tensor) -> Tensor:
    """Return the int32 product of int8 codes [m, k] and [n, k]."""
    (m, k), n = x.shape, w.shape[0]
    out = x.new_empty(m, n, dtype=torch.int32)
    pointers = (x.data_ptr(), w.data_ptr(), out.data_ptr())
    _in_parts(lambda first, last: kernel(*pointers, m, n, k, first, last), n, n * k)
    return out


@cache
def _tables() -> tuple[Tensor, Tensor]:
    """Return the numbers of nf4, and those of floats of 4 bits, by codes without a sign."""
    return torch.tensor(NORMAL_FLOAT4, device="cpu"), FLOAT4_NUMBERS


def form_of(codes: Tensor, bits: int, kind: str) -> int:
    """Return the form of codes in the kernel."""
    if codes.dtype is FLOAT8:
        return FLOATS
    if kind != "int":
        return TABLE
    return SIGNED_BYTES if codes.dtype is torch.int8 else bits


def _in_parts(act: Callable[[int, int], None], rows: int, codes: int) -> None:
    """Call `act(first, last)` for parts of the rows, in as many threads as torch has."""
    parts = min(torch.get_num_threads(), rows, max(1, codes // _SMALLEST_PART))
    if parts == 1:
        return act(0, rows)
    bounds = [rows * part // parts for part in range(parts + 1)]
    list(_threads(os.getpid(), torch.get_num_threads()).map(act, bounds[:-1], bounds[1:]))


@lru_cache(maxsize=1)
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """Return the threads of a process; those of its parent do not live in a fork."""
    return ThreadPoolExecutor(count, "meshwright products")
