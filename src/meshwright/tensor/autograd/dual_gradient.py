"""Gradients in the dual layout: autograd's local gradients as distributed tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.layout import Spec

from .._errors import OperationError
from ..conversion.convert import arranged, convert_local
from ..conversion.local_parts import spec_of
from ..core.absent_tensor import absent
from ..core.dist_tensor import as_part, plain_view
from ..torch_hooks import backward_running, is_dense, no_interception, shares_storage


def dual_stamp(grad: Tensor, spec: Spec) -> Tensor:
    """Return the local gradient of a tensor with `spec` as a distributed tensor.

    Raises OperationError for a pending product: the gradients of its factors do not determine that of the product.
    """
    if any(op == "prod" for _, op in spec.layout.partial):
        raise OperationError(
            "the gradient of a pending product",
            repr(spec),
            "each rank has the gradient of its own factor only, and the gradient of the product needs all factors",
            "call mw.reshard(x, mesh, placements) without Partial('prod') before the backward pass",
        )
    with no_interception():
        dual = spec.dual().with_dtype(grad.dtype)
        grad = arranged(grad, dual)
    out = as_part(grad, dual)
    return absent(out, dual) if current_communicator().rank not in spec.mesh else out


def alias_of(grad: Tensor) -> Tensor:
    """Return the same gradient as a separate object, which may be stamped."""
    with no_interception():
        return plain_view(grad).view_as(grad)


def as_dual_local(grad: Tensor, spec: Spec) -> Tensor:
    """Return a gradient from a hook as this rank's part of the gradient of a tensor with `spec`."""
    have = spec_of(grad, spec)
    local = convert_local(grad, have, spec.dual().with_dtype(have.dtype))
    with no_interception():
        return keep_alive_with(grad, plain_view(local))


_ALIASES = "_meshwright_aliases"
"""Attribute of a gradient that a program gave: the backward pass, and the local tensors on its memory in that pass."""


def keep_alive_with(grad: Tensor, local: Tensor) -> Tensor:
    """Return `local`, which a program gave autograd as `grad`, such that references to `grad` also hold `local`.

    Autograd takes over the memory of a gradient without other references, and copies any other gradient. A program may
    keep `grad`, and `local` is another object on the same memory. Call it with interception off.
    """
    now = backward_running()
    if local is grad or now == -1 or torch.is_grad_enabled() or not (is_dense(local) and shares_storage(local, grad)):
        return local
    local = local.detach()  # a view of `grad` would refer to `grad`, and neither would be freed
    held: Any = grad.__dict__
    before, aliases = held.get(_ALIASES, (now, []))
    held[_ALIASES] = now, [*(aliases if before == now else []), local]
    return local
