"""Types of an intercepted call, as torch passes it to `__torch_function__`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from meshwright.layout import TorchValue

TorchFunction: TypeAlias = Callable[..., TorchValue]
"""A function, method or operator of torch, or the getter or setter of an attribute, with any arguments."""
