"""The private torch names that this room needs, each with the reason."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

Operator = OpOverload
"""An ATen operator overload; its class and `_schema` have no public name."""

FakeMode = FakeTensorMode
"""Tensors that have a shape, a dtype and a device, and hold nothing."""

no_modes: Any = _disable_current_modes
"""Context in which no dispatch mode of the caller sees what is called."""


@contextmanager
def imagining(mode: FakeTensorMode) -> Generator[FakeTensorMode]:
    """Inside, tensors that are made are fake ones of `mode`."""
    with mode:
        yield mode
