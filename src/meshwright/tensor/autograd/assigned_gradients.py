"""Gradients that the program assigned: `p.grad = g` makes `g` the tensor that backward passes add to.

The gradient of a sharded parameter has the dual layout. If `g` has another layout, or is a view with its own memory,
then `p.grad` is a view of `g` that is a copy. A backward pass adds to the copy in C++, and this write is not reported.
So such a gradient is read again before each backward pass, and written back after it.
"""

from __future__ import annotations

import threading
from weakref import ref

import torch
from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.layout import Spec, TorchValue

from ..conversion.convert import convert_local
from ..conversion.local_parts import spec_of
from ..core.dist_tensor import DistTensor, as_part, plain_view
from ..torch_hooks import FakeTensor, no_interception, shares_storage
from ..views.dist_view import DistView, after_call, as_view, before_call


class _State(threading.local):
    def __init__(self) -> None:
        self.leaves: dict[int, ref[Tensor]] = {}


_state = _State()


def assign(x: DistTensor, grad: Tensor) -> None:
    """Carry out `x.grad = grad`: later additions to `x.grad` reach `grad`, as on one device."""
    have = spec_of(grad, x._spec)
    need = x._spec.dual().with_dtype(have.dtype)
    given = convert_local(grad, have, need)
    with no_interception():
        local = given if isinstance(grad, DistView) and have is need else plain_view(given)
        if _is_copy(x, grad, local):
            local = _view_of(grad, local, need)
        x.grad = local
    if isinstance(local, DistView):
        leaves, key = _state.leaves, id(x)
        leaves[key] = ref(x, lambda _: leaves.pop(key, None))


def _is_copy(x: DistTensor, grad: Tensor, local: Tensor) -> bool:
    """True if a write to the local gradient does not reach the assigned tensor."""
    if local is grad or x._away or isinstance(local, FakeTensor) or current_communicator().rank not in x._spec.mesh:
        return False
    return isinstance(grad, DistView) or not shares_storage(local, grad)


def _view_of(grad: Tensor, local: Tensor, spec: Spec) -> Tensor:
    """Return the local gradient as a view of the assigned tensor, which has another layout or is a view itself."""
    local = local.clone() if shares_storage(local, grad) else local
    base = grad if isinstance(grad, DistTensor) else as_part(grad.detach(), spec_of(grad, spec))
    view = as_view(as_part(local, spec), base, torch.ops.aten.alias.default, (base,), {}, 0)
    if isinstance(view, DistView):
        view._source.counted = isinstance(grad, DistTensor)
    return view


def has_assigned(x: Tensor) -> bool:
    """True if the gradient of `x` may be a view of a tensor that was assigned to `x.grad`."""
    return id(x) in _state.leaves


class gradients_kept_up:  # entered in every step: a class is faster than a generator
    """Context around a backward pass: assigned gradients are read again before it, and written back after it."""

    def __enter__(self) -> None:
        self._views: list[DistView] = _assigned() if _state.leaves else []
        self._before = before_call(self._views) if self._views else []

    def __exit__(self, *error: object) -> None:
        if self._views:
            with torch.no_grad():
                after_call(self._views, self._before, None)


def _assigned() -> list[DistView]:
    """Return the assigned gradients that are copies, in the order of assignment; forget the others."""
    found: list[DistView] = []
    for key, leaf in list(_state.leaves.items()):
        x = leaf()
        with no_interception():
            grad: TorchValue = None if x is None else x.grad
        if isinstance(grad, DistView):
            found.append(grad)
        else:
            _state.leaves.pop(key, None)
    return found
