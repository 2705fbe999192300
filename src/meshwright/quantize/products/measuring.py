"""Measure the most rows for which the kernels are faster than torch on this processor."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from meshwright.tensor import fast_products

from .kernels import integer_kernel, packed_kernel, run_integers
from .most_rows import ANY, MostRows
from .operators import packed_product, product_by_torch

SIZE = 2048
"""Rows and columns of the weight."""
ROWS = tuple(2**power for power in range(10))
_RUNS = 3
Act = Callable[[], object]


@torch.no_grad()
def measure_rows(on_step: Callable[[int, int], None] = lambda done, of: None) -> MostRows:
    """Return the most rows, up to 512, from the fastest of three runs each.

    It takes some seconds. `on_step` gets the number of products that were measured, and the number of all.
    """
    if packed_kernel() is None or integer_kernel() is None:
        return MostRows(0, 0, 0)
    kinds = (partial(_packed_acts, torch.float32), partial(_packed_acts, torch.bfloat16), _integer_acts)
    found: list[int] = []
    for done, acts in enumerate(kinds):
        on_step(done, len(kinds))
        found.append(_most(acts))
    return MostRows(*found)


def _most(acts: Callable[[int], tuple[Act, Act]]) -> int:
    """Return the number of rows before the first one for which the second act is faster than the first."""
    for before, rows in zip((0, *ROWS), ROWS, strict=False):
        ours, theirs = acts(rows)
        if _seconds(ours) > _seconds(theirs):
            return before
    return ANY


def _seconds(act: Act) -> float:
    act()
    return min(_timed(act) for _ in range(_RUNS))


def _timed(act: Act) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _packed_acts(dtype: torch.dtype, rows: int) -> tuple[Act, Act]:
    """Return the product with packed codes of 4 bits, and that with their numbers."""
    x = torch.ones(rows, SIZE, dtype=dtype, device="cpu")
    codes = torch.zeros(SIZE, SIZE // 8, dtype=torch.int32, device="cpu")
    scale = torch.ones(SIZE, SIZE // 128, dtype=dtype, device="cpu")

    def act(is_fast: bool) -> Tensor:
        with fast_products(is_fast):
            return packed_product(x, codes, scale, None, 4, "int")

    return lambda: act(True), lambda: act(False)


def _integer_acts(rows: int) -> tuple[Act, Act]:
    """Return the product of codes by the kernel, and that by torch."""
    kernel = integer_kernel()
    assert kernel is not None
    x, weight = (torch.ones(n, SIZE, dtype=torch.int8, device="cpu") for n in (rows, SIZE))
    return lambda: run_integers(kernel, x, weight), lambda: product_by_torch(x, weight)
