"""Tensors on a mesh that this rank is not in.

Every rank runs the same program, so a rank outside a tensor's mesh runs its lines too. There the tensor is Absent: it
has its spec, no elements, and a place in the autograd graph, so that a backward pass reaches what comes before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import Spec, replicated

from ._capture import capture
from ._dist_tensor import DistTensor, stamp
from ._errors import AbsentError
from ._tree import map_tensors, tensors_in
from .torch_hooks import no_interception


class Absent(DistTensor):
    """A distributed tensor on a rank outside its mesh."""


def absent(local: Tensor, spec: Spec) -> Absent:
    """`local`, which has no elements, as the tensor with this spec on a rank outside its mesh."""
    out = stamp(local, spec)
    out.__class__ = Absent
    return out  # pyright: ignore[reportReturnType]


class _Through(torch.autograd.Function):
    """Results without elements whose backward pass goes on to every operand."""

    @staticmethod
    def forward(ctx: Any, shapes: Any, *inputs: Tensor) -> Any:
        ctx.like = [(i.shape, i.dtype, i.device) for i in inputs]
        outs = tuple(torch.empty(s, dtype=d, device=inputs[0].device) for s, d in shapes)
        ctx.mark_non_differentiable(*[o for o in outs if not (o.is_floating_point() or o.is_complex())])
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *[torch.empty(s, dtype=d, device=v) for s, d, v in ctx.like]


def run_absent(func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
    """What `func` gives on a rank that holds none of its operands: specs without elements."""
    like = next(t._spec for t in tensors if isinstance(t, DistTensor))
    try:
        captured = capture(func, args, kwargs, lambda t: t._spec if isinstance(t, DistTensor) else None)
    except Exception as error:
        raise AbsentError(
            f"{getattr(func, '__name__', func)} on a rank outside {like.mesh!r}", str(error).split("\n")[0],
            "the result depends on values that only the mesh's ranks hold",
            "mw.reshard(x, mesh, placements) to a mesh of all ranks first",
        ) from error  # fmt: skip
    known: dict[int, Tensor] = {id(m): t for m, t in zip(captured.inputs, tensors, strict=True)}
    new = [t for t in tensors_in(captured.out) if id(t) not in known]
    specs = [Spec(like.mesh, replicated(t.dim()), t.shape, t.dtype) for t in new]
    for meta, made in zip(new, make_absent(specs, tensors), strict=True):
        known[id(meta)] = made
    written = [t for t in tensors_in(captured.out) if t in captured.inputs]
    del written
    return map_tensors(lambda t: known[id(t)], captured.out)


def make_absent(specs: Sequence[Spec], inputs: Sequence[Tensor]) -> list[Tensor]:
    """One tensor without elements per spec, behind `inputs` in the autograd graph."""
    if not specs:
        return []
    shapes = [(s.local_shape(-1), s.dtype) for s in specs]
    with no_interception():
        outs: Any = _Through.apply(shapes, *inputs)
    return [absent(o, s) for o, s in zip(outs, specs, strict=True)]
