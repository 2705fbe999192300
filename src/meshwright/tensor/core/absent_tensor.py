"""Tensors on a mesh that this rank is not in.

Every rank runs the same program, so a rank outside a tensor's mesh runs its lines too. There the tensor is Absent: it
has its spec, no elements, and a place in the autograd graph, so that a backward pass reaches what comes before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import Spec
from meshwright.reshard import away_part

from ..torch_hooks import FakeTensor, no_interception
from .dist_tensor import DistTensor, as_part


class Absent(DistTensor):
    """A distributed tensor on a rank outside its mesh."""

    _away = True


class FakeAbsent(Absent, FakeTensor):  # pyright: ignore[reportIncompatibleVariableOverride] - as FakeDistTensor
    """An absent tensor while operators are recorded."""


def absent(local: Tensor, spec: Spec) -> Absent:
    """Return `local`, which has no elements, as the tensor with this spec on a rank outside its mesh."""
    out: Any = as_part(local, spec)
    out.__class__ = FakeAbsent if isinstance(local, FakeTensor) else Absent
    return out


class _Through(torch.autograd.Function):
    """Function whose results have no elements and whose backward pass gives every operand a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, shapes: Any, *inputs: Tensor) -> Any:
        ctx.shapes = shapes
        ctx.like = [(i.shape, i.dtype, i.device) for i in inputs]
        outs = tuple(away_part(s, d, inputs[0].device) for s, d in shapes)
        ctx.mark_non_differentiable(*[o for o in outs if not (o.is_floating_point() or o.is_complex())])
        return outs

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        device = ctx.like[0][2]
        made = [
            torch.zeros(s, dtype=d, device=device) if d.is_floating_point or d.is_complex else None
            for s, d in ctx.shapes
        ]
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *[torch.zeros(s, dtype=d, device=v) for s, d, v in ctx.like]


def make_absent(specs: Sequence[Spec], inputs: Sequence[Tensor]) -> list[Absent]:
    """Return one tensor without elements per spec, computed from `inputs` in the autograd graph."""
    if not specs:
        return []
    shapes = [(s.local_shape(-1), s.dtype) for s in specs]
    with no_interception():
        outs: Any = _Through.apply(shapes, *inputs)
    return [absent(o, s) for o, s in zip(outs, specs, strict=True)]


def link(target: Tensor, inputs: Sequence[Tensor]) -> None:
    """Record in the autograd graph that `target`, which is written to, depends on `inputs`."""
    with no_interception():
        if torch.is_grad_enabled() and any(t.requires_grad for t in inputs) and target.is_floating_point():
            outs: Any = _Through.apply([(target.shape, target.dtype)], *inputs)
            target.copy_(outs[0])
