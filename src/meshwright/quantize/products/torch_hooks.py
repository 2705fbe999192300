"""Private functions of torch that this package calls.

torch.cpu._is_vnni_supported   true if the processor multiplies bytes in one instruction
"""

from __future__ import annotations

import torch


def has_integer_instructions() -> bool:
    """True if the processor multiplies bytes, and adds up the products, in one instruction."""
    return torch.cpu._is_vnni_supported()
