"""Products of few rows with a float32 matrix on the CPU, as in a step for one token, by a kernel of this library.

Such a product takes the time of reading the matrix. MKL copies the matrix first, which takes about twice as long:
`python -m benchmarks products` measures both.

The kernel adds up in another order than torch. So it is used only inside `fast_products`: all ranks that compute the
same values must choose the same kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .row_kernel import row_kernel


def has_wide_vectors() -> bool:
    """True if the vectors of the processor have 512 bits. Then the kernel adds up in another order."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


FEW = 32 if has_wide_vectors() else 16
"""Most rows for which the kernel is faster, by the width of the processor's vectors."""
_SMALL = 2**14
"""Elements of a matrix below which the call of the kernel takes longer than the product."""


class _Choice(threading.local):
    """The choice of the thread, which is that of one rank."""

    is_fast = False


_choice = _Choice()


@contextmanager
def fast_products(is_fast: bool) -> Generator[None]:
    """Use the kernel for products of few rows without gradients in this thread, in programs and in eager calls.

    All ranks pass the same flag. It is False unless `has_fast_products()` is True on all ranks, and their vectors have
    one width.
    """
    before, _choice.is_fast = _choice.is_fast, is_fast
    try:
        yield
    finally:
        _choice.is_fast = before


def has_fast_products() -> bool:
    """True if this process has the kernel, and one thread."""
    return torch.get_num_threads() == 1 and row_kernel() is not None


def products_are_fast() -> bool:
    """True inside `fast_products(True)`."""
    return _choice.is_fast


def product(x: Tensor, y: Tensor) -> Tensor:
    """Return the product of two matrices."""
    found = _product(x, y.t()) if _choice.is_fast else None
    return torch.mm(x, y) if found is None else found


def sum_with_product(bias: Tensor, x: Tensor, y: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return `bias` plus the product of two matrices, as `torch.addmm`."""
    found = _product(x, y.t()) if _choice.is_fast and beta == alpha == 1 else None
    return torch.addmm(bias, x, y, beta=beta, alpha=alpha) if found is None else found.add_(bias)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the result of `F.linear` for local parts."""
    found = _product(input, weight)
    if found is None:
        return F.linear(input, weight, bias)
    return found if bias is None else found.add_(bias)


def _product(x: Tensor, w: Tensor) -> Tensor | None:
    """Return the product of rows [..., k] and the transpose of a matrix [n, k]; None if torch computes it."""
    if not has_values(x) or not has_values(w) or w.dim() != 2:
        return None
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.get_num_threads() > 1:
        return None
    n, k = w.size()
    if n * k < _SMALL or w.stride(1) != 1 or x.size()[-1:] != (k,) or not 0 < x.numel() <= FEW * k:
        return None
    kernel = row_kernel()
    assert kernel is not None
    rows, out = x.contiguous(), x.new_empty(*x.size()[:-1], n)
    kernel(rows.data_ptr(), w.data_ptr(), out.data_ptr(), rows.numel() // k, n, k, k, w.stride(0))
    return out


def has_values(x: Tensor) -> bool:
    """True if a kernel can read the float32 numbers of the tensor from memory. A subclass may keep them elsewhere."""
    return type(x) in (Tensor, nn.Parameter) and x.dtype is torch.float32 and x.is_cpu
