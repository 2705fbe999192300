"""Converting a local part from one layout to another, differentiably.

The gradient of a conversion A → B is the conversion dual(B) → dual(A); it is differentiable in the same way, so
any number of derivatives is right by construction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import current
from meshwright.layout import Layout, Spec
from meshwright.reshard import execute, plan

from .torch_hooks import no_interception


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, src: Spec, dst: Spec) -> Tensor:
        ctx.src, ctx.dst = src, dst
        out = execute(plan(src, dst), x, current())
        return x.view_as(x) if out is x else out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        dst, src = ctx.dst.dual(), ctx.src.dual()
        return convert_local(grad, dst.with_dtype(grad.dtype), src.with_dtype(grad.dtype)), None, None


def convert_local(x: Tensor, src: Spec, dst: Spec) -> Tensor:
    """This rank's part under `dst`, from its part `x` under `src`; plain tensors, differentiable.

    Averaged terms become summed ones by a local division first, so that every term's gradient is its own.
    """
    if src is dst:
        return x
    with no_interception():
        x, src = _average_as_sum(x, src)
        after = _sum_for_average(dst)
        graded = x.requires_grad and torch.is_grad_enabled()
        if graded:
            x, src = _joined_by_gathering(x, src)
        if graded and src is not after:
            out: Tensor = _Convert.apply(x, src, after)  # pyright: ignore[reportAssignmentType]
        elif src is after:
            out = x
        else:
            with torch.no_grad():
                out = execute(plan(src, after), x, current())
        return out if after is dst else out * _ranks(dst)


def _average_as_sum(x: Tensor, src: Spec) -> tuple[Tensor, Spec]:
    if not any(op == "avg" for _, op in src.layout.partial):
        return x, src
    return x / _ranks(src), _sum_for_average(src)


def _sum_for_average(spec: Spec) -> Spec:
    if not any(op == "avg" for _, op in spec.layout.partial):
        return spec
    partial = tuple((a, "sum" if op == "avg" else op) for a, op in spec.layout.partial)
    return spec.with_layout(Layout(spec.layout.dims, partial, spec.layout.varying))


def _joined_by_gathering(x: Tensor, src: Spec) -> tuple[Tensor, Spec]:
    """Terms of max, min and prod gathered along a new dim and joined there, where torch knows the gradient."""
    for axis, op in src.layout.partial:
        if op not in _JOINED:
            continue
        rest = tuple(p for p in src.layout.partial if p[0] != axis)
        shape = (src.mesh.sizes[axis], *src.shape)
        stacked = Spec(src.mesh, Layout(((axis,), *src.layout.dims), rest, src.layout.varying), shape, src.dtype)
        whole = stacked.with_layout(Layout(((), *src.layout.dims), rest, src.layout.varying))
        x = _JOINED[op](convert_local(x.unsqueeze(0), stacked, whole))
        src = src.with_layout(Layout(src.layout.dims, rest, src.layout.varying))
    return x, src


_JOINED: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "prod": lambda x: x.prod(0),
}


def _ranks(spec: Spec) -> int:
    """Number of terms that an average is taken over."""
    total = 1
    for axis, op in spec.layout.partial:
        total *= spec.mesh.sizes[axis] if op == "avg" else 1
    return total
