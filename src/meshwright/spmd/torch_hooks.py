"""The private torch names that this room needs, each with the reason."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload

Operator = OpOverload
"""An ATen operator overload: `torch.ops.aten.add.Tensor`. Its class and `_schema` have no public name."""


def schema_of(op: OpOverload) -> Any:
    """Arguments with names, types and what they alias; no public name gives them."""
    return op._schema


def overload_of(op: OpOverload) -> str:
    """`Tensor` of `aten.add.Tensor`."""
    return op._overloadname
