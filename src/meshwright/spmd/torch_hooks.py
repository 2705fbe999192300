"""The private torch names that this room needs, each with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

Operator = OpOverload
"""An ATen operator overload: `torch.ops.aten.add.Tensor`. Its class and `_schema` have no public name."""


def schema_of(op: OpOverload) -> Any:
    """Arguments with names, types and what they alias; no public name gives them."""
    return op._schema


def overload_of(op: OpOverload) -> str:
    """`Tensor` of `aten.add.Tensor`."""
    return op._overloadname


def tell_shapes(op: str, shapes: Callable[..., Any]) -> None:
    """What an ATen operator gives on the meta device, where torch has no answer; only private names tell whether."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", "Meta"):
        _ON_META.impl(op, shapes)


_ON_META = torch.library.Library("aten", "IMPL", "Meta")
