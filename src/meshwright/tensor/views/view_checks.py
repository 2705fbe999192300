"""Errors for writes to views that one device refuses, or whose result would depend on the order of elements."""

from __future__ import annotations

import torch
from torch import Tensor

from .._errors import OperationError
from ..core.dist_tensor import DistTensor, is_leaf, wants_grad
from ..torch_hooks import no_interception
from .dist_view import DistView, base_of, may_require_grad
from .view_origin import several_views_error, shares_elements


def check_writable(x: Tensor, reads: bool = False, graded: bool = False) -> None:
    """Raise OperationError if `x` is a view that cannot be written to; call it before the first write.

    `graded` is True if autograd records the write.
    """
    if not isinstance(x, DistView):
        return
    source = x._outer._source
    if graded and x._seen and not source.tracked:
        raise OperationError(
            "an in-place write that autograd records",
            f"{x._spec!r}, a view that was made under torch.no_grad()",
            "the view has no autograd history from its base, and the write would give the base a history",
            "make the view and write to it in the same mode: both under torch.no_grad(), or both outside",
        )
    if graded and _has_graded_leaf(x):
        raise OperationError(
            "an in-place write that autograd records",
            f"{x._spec!r}, a view of a leaf that requires grad",
            "a view of a leaf Variable that requires grad is being used in an in-place operation",
            "write under torch.no_grad(), or to a view of leaf.clone()",
        )
    if not source.single and torch.is_grad_enabled():
        raise several_views_error(source, "a write to a view")
    if reads:
        check_own_elements(x)
    if 0 in source.base._spec.full_strides:
        raise OperationError(
            "a write to a view",
            f"a view of {source.base._spec!r}, in which several elements share memory",
            "the view has its own memory on this rank, and one value cannot be written to several elements",
            "write to a tensor that is not expanded, or make the view of x.clone()",
        )
    check_writable(source.base, graded=graded)


def _has_graded_leaf(view: DistView) -> bool:
    """True if autograd sees writes to the view, and its base is a leaf that requires grad."""
    if not may_require_grad(view):
        return False
    with no_interception():
        base = base_of(view)
        first = base._base if isinstance(base._base, DistTensor) else base
        return wants_grad(first) and is_leaf(first)


def check_own_elements(x: DistTensor) -> None:
    """Raise OperationError if elements of `x` share memory, for a write that reads the elements on other memory."""
    if shares_elements(x._spec.full_strides, x._spec.shape):
        raise OperationError(
            "an in-place write to a view",
            f"{x._spec!r}, in which several elements share memory",
            "the result depends on the order in which a kernel visits the elements",
            "write to the tensor itself, or to view.clone()",
        )
