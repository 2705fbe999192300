"""Private functions of torch that this package calls.

torch.cpu._is_vnni_supported   true if the processor multiplies bytes in one instruction
torch._int_mm                  the product of two int8 matrices in int32
"""

from __future__ import annotations

import torch
from torch import Tensor


def has_integer_instructions() -> bool:
    """True if the processor multiplies bytes, and adds up the products, in one instruction."""
    return torch.cpu._is_vnni_supported()


def product_of_integers(x: Tensor, weight: Tensor) -> Tensor:
    """Return the int32 product of int8 codes [m, k] and [n, k]."""
    return torch.ops.aten._int_mm(x, weight.t())
