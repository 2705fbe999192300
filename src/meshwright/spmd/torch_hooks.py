"""The private torch names that this room needs, each with the reason."""

from __future__ import annotations

from torch._ops import OpOverload

Operator = OpOverload
"""An ATen operator overload: `torch.ops.aten.add.Tensor`. Its class and `_schema` have no public name."""
