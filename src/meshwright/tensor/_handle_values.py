"""Python values of tensors: the same on every rank of the world."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.comm import current
from meshwright.layout import Layout, ProcessMesh, Spec, replicated

from ._convert import convert_local
from ._dist_tensor import DistTensor, plain_view
from ._local import whole_local
from ._registry import handles
from ._tree import map_tensors
from .torch_hooks import no_interception, unscale


def everywhere(x: Tensor) -> Tensor:
    """The whole value of `x` as a plain tensor on every rank of the world, not only of its mesh."""
    if not isinstance(x, DistTensor):
        return x
    x._read_again()
    carrier = current()
    if x._spec.mesh.size == carrier.size:
        return whole_local(x)
    world = ProcessMesh(range(carrier.size), ["world"])
    spec = x._spec.with_layout(replicated(x._spec.ndim))
    local = convert_local(x, x._spec, spec) if carrier.rank in x._spec.mesh else x
    out = convert_local(local, spec, Spec(world, spec.layout, spec.shape, spec.dtype))
    with no_interception():
        return plain_view(out)


@handles(
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__,
    Tensor.__complex__, Tensor.__array__, torch.equal, torch.allclose, Tensor.equal, Tensor.allclose,
    Tensor.__contains__, Tensor.is_nonzero, torch.is_nonzero, Tensor.__format__,
)  # fmt: skip
def _value(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """The same Python value on every rank."""
    args, kwargs = map_tensors(everywhere, (args, kwargs))
    with no_interception():
        return func(*args, **kwargs)


@handles(unscale)
def _unscale(func: Any, types: Any, args: Any, kwargs: Any) -> None:
    """Gradient scaling: every rank of the world learns of a gradient that is not finite anywhere."""
    grads, found, inverse = args
    for grad in grads:
        grad.mul_(whole_local(inverse))
    with no_interception():
        bad = torch.tensor([float(any(not g.isfinite().all() for g in grads))])
    world = ProcessMesh(range(current().size), ["world"])
    spec = Spec(world, Layout(((),), (("world", "max"),)), (1,), bad.dtype)
    worst = convert_local(bad, spec, spec.with_layout(replicated(1)))
    with no_interception():
        found.copy_(torch.maximum(found, worst.reshape(found.shape).to(found.dtype)))
