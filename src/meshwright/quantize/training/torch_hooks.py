"""The private torch name that training needs: the modes around a call, which a backward pass does not have."""

from __future__ import annotations

import torch
from torch.overrides import _get_current_function_mode_stack

from meshwright.fixed_order import SameNumbers


def in_same_numbers() -> bool:
    """True inside `mw.same_numbers()`, unless torch.compile traces the call."""
    modes = [] if torch.compiler.is_compiling() else _get_current_function_mode_stack()
    return any(isinstance(mode, SameNumbers) for mode in modes)
