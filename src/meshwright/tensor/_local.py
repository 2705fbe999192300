"""Local parts of distributed tensors: converted, made whole, written back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.layout import Spec, replicated

from ._convert import convert_local
from ._dist_tensor import DistTensor, plain_view
from ._pending import defer_reduction
from .torch_hooks import no_interception


def shared_convert(x: Tensor, have: Spec, need: Spec) -> Tensor:
    """`x` under `need`; converted once and shared by all that use it so, as long as it is not written to."""
    if not isinstance(x, DistTensor):
        return convert_local(x, have, need)
    graded = torch.is_grad_enabled()
    with no_interception():
        version, leaf = x._version, x.is_leaf and x.requires_grad
    if leaf:
        deferred = defer_reduction(x, have, need) if graded else None
        return convert_local(x, have, need) if deferred is None else deferred
    shared: dict[Any, tuple[int, Tensor]] = x.__dict__.setdefault("_shared", {})
    found = shared.get((need, graded))
    if found is not None and found[0] == version:
        return found[1]
    out = convert_local(x, have, need)
    shared[(need, graded)] = (version, out)
    return out


def whole_spec(spec: Spec) -> Spec:
    """The spec of the same tensor when every rank holds it whole."""
    return spec.with_layout(replicated(spec.ndim))


def whole_local(x: Tensor) -> Tensor:
    """The whole value of `x` as a plain local tensor on every rank of its mesh."""
    if not isinstance(x, DistTensor):
        return x
    out = convert_local(x, x._spec, whole_spec(x._spec))
    with no_interception():
        return plain_view(out)


def spec_of(x: Tensor, like: Spec) -> Spec:
    """The spec of `x`; a plain tensor is replicated over the mesh of `like`."""
    return x._spec if isinstance(x, DistTensor) else Spec(like.mesh, replicated(x.dim()), x.shape, x.dtype)


def write_into(target: DistTensor, new: Tensor) -> DistTensor:
    """Writes the value of `new` into `target`, broadcast, whatever their layouts, and returns `target`."""
    spec = target._spec
    if new.shape != spec.shape:
        new = new.expand(spec.shape)
    have = spec_of(new, spec)
    local = convert_local(new, have, spec.with_dtype(have.dtype))
    with no_interception():
        target.copy_(local)
    return target
