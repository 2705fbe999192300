"""Large float32 matrix products: time of torch.mm (MKL) divided by that of the kernels chosen here.

Shapes are those of the `compute` model of `static_speed`, forward and for the gradient of the operand. Both take turns
in short blocks in one process, on one thread. Beside them are products of few rows, as in a step for one token of the
model of `generate_speed`, with matrices that are not in the cache of the processor's core.
"""

from __future__ import annotations

from math import exp, log
from typing import Any

import torch

from benchmarks._blocks import best_ms
from meshwright.graph.execution.matrix_products import by_onednn, matmul
from meshwright.tensor import fast_products, has_fast_products, product

SHAPES = [(512, 512, 512), (512, 512, 1376), (512, 1376, 512), (512, 512, 2048), (512, 2048, 512)]
FEW_ROWS = [(8, 512, 256), (8, 512, 688), (8, 512, 4096), (32, 512, 688)]
MATRICES = 12
"""Different matrices in turn: more than a core's cache holds."""
GOAL = 1.0


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the geometric mean over shapes of torch.mm / ours."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = [row(*shape, turned, 5 if quick else 25) for shape in SHAPES for turned in (True, False)]
    few = [few_rows(*shape, 5 if quick else 25) for shape in FEW_ROWS]
    torch.set_num_threads(threads)
    value = round(exp(sum(log(r["ratio"]) for r in rows) / len(rows)), 3)
    return {
        "name": "products",
        "value": value,
        "goal": "torch.mm / ours at least 1 (0.97 where both are the same)",
        "ok": value >= (GOAL if by_onednn() else 0.97),
        "rival": {"name": "torch.mm", "value": 1.0},
        "details": {"by oneDNN": by_onednn(), "rows": rows, "few rows": few},
    }


def row(m: int, k: int, n: int, turned: bool, blocks: int) -> dict[str, Any]:
    """Return milliseconds of both for one shape; `turned` if the second matrix is the transpose of a weight."""
    x = torch.randn(m, k)
    y = torch.randn(n, k).t() if turned else torch.randn(k, n)
    torch.testing.assert_close(matmul(x, y), x @ y, rtol=1e-3, atol=1e-2)
    ms = best_ms({"mm": lambda: torch.mm(x, y), "ours": lambda: matmul(x, y)}, blocks)
    rounded = {f"{name}_ms": round(t, 3) for name, t in ms.items()}
    return {"shape": [m, k, n], "turned": turned, **rounded, "ratio": round(ms["mm"] / ms["ours"], 3)}


def few_rows(m: int, k: int, n: int, blocks: int) -> dict[str, Any]:
    """Return milliseconds of a product of few rows for torch.mm and inside `fast_products`."""
    x, matrices = torch.randn(m, k), [torch.randn(n, k).t() for _ in range(MATRICES)]

    def multiply(is_fast: bool) -> None:
        with torch.no_grad(), fast_products(is_fast):
            for y in matrices:
                product(x, y)

    ms = best_ms({"mm": lambda: multiply(False), "ours": lambda: multiply(has_fast_products())}, blocks)
    each = {f"{name}_ms": round(t / MATRICES, 4) for name, t in ms.items()}
    return {"shape": [m, k, n], **each, "ratio": round(ms["mm"] / ms["ours"], 3)}
