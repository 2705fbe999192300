"""Private names of torch that this package uses, each with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from meshwright.layout import TorchValue, platform_of

Operator = OpOverload
"""An ATen operator overload: `torch.ops.aten.add.Tensor`. Its class and `_schema` have no public name."""


def schema_of(op: OpOverload) -> TorchValue:
    """Return the schema: arguments with names, types and alias sets. torch has no public name for it."""
    return op._schema


def overload_of(op: OpOverload) -> str:
    """Return the overload name, such as `Tensor` for `aten.add.Tensor`."""
    return op._overloadname


def register_meta_kernel(op: str, shapes: Callable[..., Any]) -> None:
    """Register a meta kernel for an ATen operator if torch has none; only a private name says if it has one."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", "Meta"):
        _ON_META.impl(op, shapes)


def can_assert_on(device: torch.device) -> bool:
    """True if a device has the kernel of `torch.ops.aten._assert_async`, which torch has for few devices.

    Programs are also recorded for devices that this process does not have. The platform tells about those.
    """
    if device.type == "meta" or platform_of(device).asserts:
        return True
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key("aten::_assert_async.msg", key)


_ON_META = torch.library.Library("aten", "IMPL", "Meta")
