"""Gradients of views that were made under `torch.no_grad` before a write gave a history to their base.

On one device, each use of such a view that autograd records raises an error. The view keeps its values here, and gets a
history whose backward pass raises the error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from meshwright.layout import Spec, TorchValue

from .._errors import OperationError
from ..torch_hooks import bare_apply, bare_backward


def lost_history_error(spec: Spec) -> OperationError:
    """Return the error for a gradient of such a view, in torch's words."""
    return OperationError(
        "a gradient of a view",
        f"{spec!r}, a view that was made under torch.no_grad()",
        "A view was created in no_grad mode and its base or another view of its base has been modified inplace with "
        "grad mode enabled",
        "make the view and write to its base in the same mode, or use view.detach()",
    )


class _LostHistory(torch.autograd.Function):
    """A copy whose backward pass raises OperationError."""

    @staticmethod
    def forward(ctx: TorchValue, x: Tensor, spec: Spec) -> Tensor:
        ctx.spec = spec
        return x.clone()

    @staticmethod
    def backward(ctx: TorchValue, *grads: Tensor) -> NoReturn:
        raise lost_history_error(ctx.spec)


without_gradient: Callable[[Tensor, Spec], Tensor] = bare_apply(_LostHistory)
"""Return a copy of a local part, whose backward pass raises OperationError."""
bare_backward(_LostHistory)
