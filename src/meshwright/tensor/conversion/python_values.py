"""Python values of tensors, which are the same on every rank of the world."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from meshwright.comm import current_communicator, world_ranks
from meshwright.layout import Layout, ProcessMesh, Spec, TorchValue, replicated

from .._torch_call import Arguments, NamedArguments, TorchFunction
from ..core.computation_numbers import collectives_of_call
from ..core.dist_tensor import DistTensor, plain_view
from ..core.handler_registry import handles
from ..core.tree import map_tensors
from ..torch_hooks import no_interception, unscale
from .convert import convert_local
from .local_parts import whole_local, write_into


def gather_everywhere(x: Tensor) -> Tensor:
    """Return the whole value of `x` as a plain tensor on every rank of the world, not only of its mesh."""
    if not isinstance(x, DistTensor):
        return x
    x._read_again()
    with collectives_of_call("the whole value", [x]):
        return _everywhere(x)


def _everywhere(x: DistTensor) -> Tensor:
    ranks = world_ranks()
    if x._spec.mesh.size == len(ranks):
        return whole_local(x)
    world = ProcessMesh(ranks, ["world"])
    spec = x._spec.with_layout(replicated(x._spec.ndim))
    local = convert_local(x, x._spec, spec) if current_communicator().rank in x._spec.mesh else x
    out = convert_local(local, spec, Spec(world, spec.layout, spec.shape, spec.dtype))
    with no_interception():
        return plain_view(out)


@handles(
    Tensor.item,
    Tensor.tolist,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__index__,
    Tensor.__complex__,
    torch.equal,
    torch.allclose,
    Tensor.equal,
    Tensor.allclose,
    Tensor.__contains__,
    Tensor.is_nonzero,
    torch.is_nonzero,
    Tensor.__format__,
)
def _value(func: TorchFunction, types: Sequence[type], args: Arguments, kwargs: NamedArguments) -> TorchValue:
    """Return the same Python value on every rank; autograd does not record it, as on one device."""
    with torch.no_grad():
        args, kwargs = map_tensors(gather_everywhere, (args, kwargs))
    with no_interception():
        return func(*args, **kwargs)


@handles(unscale)
def _unscale(func: TorchFunction, types: Sequence[type], args: Arguments, kwargs: NamedArguments) -> None:
    """Unscale this rank's parts of gradients by torch's own function, and share its result with every rank.

    A gradient that is a pending sum is checked after the sum, because finite terms may add up to infinity.
    """
    grads, found, inverse = args
    factor, before = whole_local(inverse), whole_local(found)
    sums = [whole_local(g) for g in grads if isinstance(g, DistTensor) and g._spec.layout.partial and not g._away]
    with no_interception():
        here = torch.zeros_like(before)
        parts = _parts(grads)
        if parts:
            func(parts, here, factor)
        if not all(bool(x.isfinite().all()) for x in sums):
            here.fill_(1.0)
    worst = largest_anywhere(here)
    with torch.no_grad():
        with no_interception():
            after = torch.maximum(before, worst)
        write_into(found, after)


def not_finite_anywhere(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return 1.0 if any rank of the world has a non-finite number in its parts of the tensors, else 0.0.

    The result is a plain tensor without dims on `device`, equal on all ranks. Every rank makes the call.
    """
    with no_interception():
        bad = [x.isfinite().logical_not().any().to(device) for x in _parts(tensors)]
        here = torch.stack(bad).any().float() if bad else torch.zeros((), device=device)
    return largest_anywhere(here)


def largest_anywhere(number: Tensor) -> Tensor:
    """Return the largest of all ranks' numbers, each a plain tensor of one element; every rank makes the call."""
    world = ProcessMesh(world_ranks(), ["world"])
    spec = Spec(world, Layout(((),), (("world", "max"),)), (1,), number.dtype)
    out = convert_local(number.reshape(1), spec, spec.with_layout(replicated(1)))
    with no_interception():
        return plain_view(out).reshape(number.shape)


def _parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's parts of the tensors as plain tensors; call it with interception off."""
    return [plain_view(x) for x in tensors if not (isinstance(x, DistTensor) and x._away) and x.numel()]
