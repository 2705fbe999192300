"""Check of the property of torch's kernels on which `same_numbers` depends."""

from __future__ import annotations

from functools import cache, lru_cache

import torch

from ._errors import SameNumbersError

ROWS, CONTRACTED = 16, 32
"""Multiples to which rows and columns, and the contraction, are padded."""
SIZES = ((ROWS, CONTRACTED, ROWS), (3 * ROWS, 4 * CONTRACTED, 6 * ROWS), (8 * ROWS, 16 * CONTRACTED, 24 * ROWS))
"""Rows, contraction and columns of the products that are compared."""
UNPADDED = ((ROWS, 5, ROWS), (3 * ROWS, 43, 6 * ROWS), (8 * ROWS, 172, 24 * ROWS))
"""The same for products whose contraction is not padded."""


@cache
def check_kernels() -> None:
    """Compare products with those of their rows and columns; once for each process.

    Raises:
        SameNumbersError: an element of a product in float32 depends on other rows or columns.
    """
    sizes = _inseparable_sizes(torch.float32)
    if sizes is not None:
        m, k, n = sizes
        raise SameNumbersError(
            "same_numbers() on float32",
            f"torch {torch.__version__}, whose product of ({m}, {k}) and ({k}, {n}) differs from its parts",
            "the contract needs products whose elements depend on their own row and column only",
            "use another build of torch, such as one with MKL and oneDNN",
        )
    for dtype in (torch.float32, torch.bfloat16):  # memoized now: inside a capture, products are fake
        is_separable("cpu", dtype)
        pads_contraction("cpu", dtype)


@lru_cache(maxsize=64)
def is_separable(device: str, dtype: torch.dtype) -> bool:
    """True if elements of a padded product depend on their own row and column only, in whatever memory order.

    Kernels of float16 compute an element from other columns too. So do kernels of bfloat16 on processors without
    instructions for it: they add up a transposed operand in another order.
    """
    if dtype == torch.float16:
        return False
    return device != "cpu" or _inseparable_sizes(dtype) is None


@lru_cache(maxsize=64)
def pads_contraction(device: str, dtype: torch.dtype) -> bool:
    """True if the contraction of a product must be padded for its elements to depend on their row and column only."""
    if device != "cpu" or not is_separable(device, dtype):
        return True
    return not all(_is_separable(*_operands(sizes, dtype)) for sizes in UNPADDED)


def _inseparable_sizes(dtype: torch.dtype) -> tuple[int, int, int] | None:
    return next((sizes for sizes in SIZES if not _is_separable(*_operands(sizes, dtype))), None)


def _operands(sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    m, k, n = sizes
    generator = torch.Generator(device="cpu").manual_seed(0)
    x = torch.randn(m, k, generator=generator, device="cpu")
    return x.to(dtype), torch.randn(k, n, generator=generator, device="cpu").to(dtype)


def _is_separable(x: torch.Tensor, w: torch.Tensor) -> bool:
    whole = x @ w
    by_rows = torch.cat([part @ w for part in x.split(ROWS)])
    by_columns = torch.cat([x @ part for part in w.split(ROWS, 1)], 1)
    copied = x @ w.t().contiguous().t()
    batched = (torch.stack([x, x]) @ torch.stack([w, w]))[1]
    return all(torch.equal(whole, other) for other in (by_rows, by_columns, copied, batched))
