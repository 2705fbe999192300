"""Tensors on a mesh that this rank is not in.

Every rank runs the same program, so a rank outside a tensor's mesh runs its lines too. There the tensor is Absent: it
has its spec, no elements, and a place in the autograd graph, so that a backward pass reaches what comes before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.layout import Spec, TorchValue
from meshwright.reshard import away_part

from .._torch_call import TorchFunction
from ..torch_hooks import FakeTensor, no_interception
from .dist_tensor import DistTensor, as_part, change_class


class Absent(DistTensor):
    """A distributed tensor on a rank outside its mesh."""

    _away = True
    _view_of: Tensor | None = None
    """The tensor that this one is a view of."""

    def __lt__(self, other: TorchValue) -> Tensor:
        return _compared(Tensor.__lt__, Tensor.__gt__, self, other)

    def __gt__(self, other: TorchValue) -> Tensor:
        return _compared(Tensor.__gt__, Tensor.__lt__, self, other)

    def __le__(self, other: TorchValue) -> Tensor:
        return _compared(Tensor.__le__, Tensor.__ge__, self, other)

    def __ge__(self, other: TorchValue) -> Tensor:
        return _compared(Tensor.__ge__, Tensor.__le__, self, other)

    def __eq__(self, other: object) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - as torch's
        return _compared(Tensor.__eq__, Tensor.__eq__, self, other)

    def __ne__(self, other: object) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - as torch's
        return _compared(Tensor.__ne__, Tensor.__ne__, self, other)

    __hash__ = Tensor.__hash__


def _compared(own: TorchFunction, mirrored: TorchFunction, x: Absent, y: TorchValue) -> Tensor:
    """Return the comparison of `x` and `y`; of tensors on two meshes, the same call on all ranks.

    For `a < b`, Python calls `b > a` instead if only `b` is of this class, which is so on some ranks only.
    """
    is_first = not isinstance(y, DistTensor) or x._spec.mesh.process_ids <= y._spec.mesh.process_ids
    return own(x, y) if is_first else mirrored(y, x)


class FakeAbsent(Absent, FakeTensor):  # pyright: ignore[reportIncompatibleVariableOverride] - as FakeDistTensor
    """An absent tensor while operators are recorded."""


def absent(local: Tensor, spec: Spec) -> Absent:
    """Return `local`, which has no elements, as the tensor with this spec on a rank outside its mesh."""
    kind = FakeAbsent if isinstance(local, FakeTensor) else Absent
    return change_class(as_part(local, spec), kind)


class _Through(torch.autograd.Function):
    """Function whose results have no elements and whose backward pass gives every operand a gradient of zeros."""

    @staticmethod
    def forward(
        ctx: TorchValue, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.shapes = shapes
        ctx.like = [(i.shape, i.dtype, i.device) for i in inputs]
        outs = tuple(away_part(s, d, inputs[0].device) for s, d in shapes)
        ctx.mark_non_differentiable(*[o for o in outs if not (o.is_floating_point() or o.is_complex())])
        return outs

    @staticmethod
    def jvp(ctx: TorchValue, *tangents: TorchValue) -> tuple[Tensor | None, ...]:
        """Return tangents without elements, which depend on those of the operands in the autograd graph."""
        given = [t for t in tangents if isinstance(t, Tensor)]
        outs: TorchValue = _Through.apply(ctx.shapes, *given)
        graded = [dtype.is_floating_point or dtype.is_complex for _, dtype in ctx.shapes]
        return tuple(out if is_graded else None for out, is_graded in zip(outs, graded, strict=True))

    @staticmethod
    def backward(ctx: TorchValue, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[torch.zeros(s, dtype=d, device=v) for s, d, v in ctx.like]


def make_absent(specs: Sequence[Spec], inputs: Sequence[Tensor]) -> list[Absent]:
    """Return one tensor without elements per spec, computed from `inputs` in the autograd graph."""
    if not specs:
        return []
    shapes = [(s.local_shape(-1), s.dtype) for s in specs]
    with no_interception():
        outs: TorchValue = _Through.apply(shapes, *inputs)
    return [absent(o, s) for o, s in zip(outs, specs, strict=True)]


def link(target: Tensor, inputs: Sequence[Tensor]) -> None:
    """Record in the autograd graph that `target`, which is written to, depends on `inputs`; its base does so too."""
    with no_interception():
        if torch.is_grad_enabled() and any(t.requires_grad for t in inputs) and target.is_floating_point():
            outs: TorchValue = _Through.apply([(target.shape, target.dtype)], *inputs)
            target.copy_(outs[0])
    if isinstance(target, Absent) and target._view_of is not None:
        link(target._view_of, inputs)
