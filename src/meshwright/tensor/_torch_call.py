"""Types of the parts of a call of torch."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.layout import TorchValue

TorchFunction = Callable[..., TorchValue]
"""A function, a method or an operator of torch."""

Arguments = tuple[TorchValue, ...]
"""The positional arguments of a call."""

NamedArguments = dict[str, TorchValue]
"""The keyword arguments of a call."""
