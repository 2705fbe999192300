"""Types of the parts of a call of torch."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.layout import TorchValue

TorchFunction = Callable[..., TorchValue]
"""A function, method or operator of torch, or the getter or setter of an attribute, with any arguments."""

Arguments = tuple[TorchValue, ...]
"""The positional arguments of a call."""

NamedArguments = dict[str, TorchValue]
"""The keyword arguments of a call."""
