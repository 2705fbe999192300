"""Check of the property of torch's kernels on which `same_numbers` depends."""

from __future__ import annotations

from functools import cache

import torch

from ._errors import SameNumbersError
from .kernels import CONTRACTED, ROWS

SIZES = ((ROWS, CONTRACTED, ROWS), (3 * ROWS, 4 * CONTRACTED, 6 * ROWS), (8 * ROWS, 16 * CONTRACTED, 24 * ROWS))
"""Rows, contraction and columns of the products that are compared."""


@cache
def check_kernels() -> None:
    """Compare products with those of their rows and columns; once for each process.

    Raises:
        SameNumbersError: an element of a product depends on other rows or columns.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for m, k, n in SIZES:
            x = torch.randn(m, k, generator=generator, device="cpu").to(dtype)
            w = torch.randn(k, n, generator=generator, device="cpu").to(dtype)
            if not _is_separable(x, w):
                raise SameNumbersError(
                    f"same_numbers() on {dtype}",
                    f"torch {torch.__version__}, whose product of ({m}, {k}) and ({k}, {n}) differs from its parts",
                    "the contract needs products whose elements depend on their own row and column only",
                    "use another build of torch, such as one with MKL and oneDNN",
                )


def _is_separable(x: torch.Tensor, w: torch.Tensor) -> bool:
    whole = x @ w
    by_rows = torch.cat([part @ w for part in x.split(ROWS)])
    by_columns = torch.cat([x @ part for part in w.split(ROWS, 1)], 1)
    copied = x @ w.t().contiguous().t()
    return all(torch.equal(whole, other) for other in (by_rows, by_columns, copied))
