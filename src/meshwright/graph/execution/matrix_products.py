"""Matrix products in kernels, by the library that is faster on the processor.

torch multiplies float32 matrices with MKL, which uses a code path for older processors on AMD; oneDNN does not. For
small matrices the call overhead of oneDNN is larger than its gain. `python -m benchmarks products` measures both.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..torch_hooks import has_onednn_product, onednn_product

LARGE = 2**24
"""Number of multiplications from which oneDNN is faster in spite of its call overhead."""
_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_LIBRARY.define("matmul(Tensor x, Tensor y) -> Tensor")


def _shown(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], y.shape[1])


_LIBRARY.impl("matmul", onednn_product, "CPU")
_LIBRARY.impl("matmul", _shown, "Meta")


@cache
def by_onednn() -> bool:
    """True on AMD processors if oneDNN is available."""
    info = Path("/proc/cpuinfo")
    return info.exists() and "AuthenticAMD" in info.read_text() and has_onednn_product()


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Return the product of two matrices."""
    rows = x.stride(1) == 1 and x.dtype == torch.float32 and x.device.type == "cpu"
    if rows and x.shape[0] * y.numel() >= LARGE and by_onednn():
        return torch.ops.meshwright.matmul(x, y)
    return torch.ops.aten.mm.default(x, y)
