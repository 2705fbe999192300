"""The private torch names that this room needs, each with the reason."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Operator = OpOverload
"""An ATen operator overload; its class and `_schema` have no public name."""

FakeMode = FakeTensorMode
"""Tensors that have a shape, a dtype and a device, and hold nothing."""

DataDependent = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    symbolic_shapes.GuardOnDataDependentSymNode,
)
"""What fake tensors raise when Python asks for their numbers."""

interception_off: Any = torch._C.DisableTorchFunctionSubclass
"""Context in which distributed tensors are the parts that they are."""

unrecorded: Any = _disable_current_modes
"""Context in which what is called is no part of the program that is being recorded."""

no_modes: Any = _disable_current_modes
"""Context in which no dispatch mode of the caller sees what is called."""


@contextmanager
def imagining(mode: FakeTensorMode) -> Generator[FakeTensorMode]:
    """Inside, tensors that are made are fake ones of `mode`."""
    with mode:
        yield mode


def memory_of(x: torch.Tensor) -> Any:
    """What two tensors share when they look at the same memory; also of tensors that hold nothing."""
    return x.untyped_storage()._cdata


Modes = TorchDispatchMode
"""Base of what sees every operator below autograd."""

ShapeEnv = symbolic_shapes.ShapeEnv
"""Where symbolic numbers live; with one, `.item()` of a fake tensor is a symbol."""


def symbolic_float(mode: FakeTensorMode, name: str, hint: float) -> Any:
    """A float that is not known yet, in the world of `mode`."""
    env, source = _world(mode), ConstantSource(name)
    symbol = env.create_unspecified_symbol(hint, source=source, dynamic_dim=symbolic_shapes.DimDynamic.DYNAMIC)
    return env.create_symfloatnode(symbol, hint=hint, source=source)


def symbolic_int(mode: FakeTensorMode, name: str, hint: int) -> Any:
    """An integer that is not known yet, in the world of `mode`."""
    env, source = _world(mode), ConstantSource(name)
    symbol = env.create_unspecified_symbol(hint, source=source, dynamic_dim=symbolic_shapes.DimDynamic.DYNAMIC)
    return env.create_symintnode(symbol, hint=hint, source=source)


def _world(mode: FakeTensorMode) -> symbolic_shapes.ShapeEnv:
    assert mode.shape_env is not None
    return mode.shape_env
