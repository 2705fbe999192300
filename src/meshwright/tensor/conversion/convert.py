"""Conversion of a local part from one layout to another, differentiably.

The gradient of a conversion A → B is the conversion dual(B) → dual(A); it is differentiable in the same way, so any
number of derivatives is right by construction.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor, is_grad_enabled

from meshwright.comm import current_communicator
from meshwright.layout import Layout, Spec, TorchValue, dense_strides, without_trivial_axes
from meshwright.reshard import ConversionPlan, Relabel, plan, transposed

from ..core.call_sites import is_backward, keep_call_site
from ..core.computation_numbers import collectives_of_gradient, is_numbering, keep_number
from ..core.dist_tensor import wants_grad
from ..torch_hooks import (
    FakeTensor,
    bare_apply,
    bare_backward,
    forward_mode,
    keep_bits,
    modes_active,
    no_interception,
    no_modes,
    set_grad_enabled,
    unwritten,
)
from .checkpointed_moves import across_stages

_is_neg, _is_conj, _is_inference, _detach = Tensor.is_neg, Tensor.is_conj, Tensor.is_inference, Tensor.detach
"""Methods of the local part, without those of distributed tensors; call them with interception off."""


class Move:
    """A conversion of local parts: its steps, its transpose, and the memory format of its result.

    `is_trivial` is True if the conversion changes neither value nor gradient: axes whose role changes have size 1.
    """

    def __init__(self, src: Spec, dst: Spec) -> None:
        self.src, self.dst = src, dst
        self.graded = src.dtype.is_floating_point or src.dtype.is_complex
        self.special = any(op != "sum" for s in (src, dst) for _, op in s.layout.partial)
        self.is_trivial = src.mesh is dst.mesh and _real(src) == _real(dst) and src.strides == dst.strides

    @cached_property
    def plan(self) -> ConversionPlan:
        return plan(self.src.contiguous, self.dst.contiguous)

    @cached_property
    def arranges(self) -> bool:
        """True if the result of the steps has another memory format than `dst`, so that it is copied."""
        if self.is_relabel:
            return self.src.strides != self.dst.strides
        return self.dst.new.order is not None

    @cached_property
    def is_relabel(self) -> bool:
        """True if no element moves, so that only the layout of the gradient differs."""
        return all(isinstance(s, Relabel) for s in self.plan.steps)

    @cached_property
    def reduces_only(self) -> bool:
        """True if the conversion reduces all pending sums, and changes no sharding."""
        src, dst = self.src.layout, self.dst.layout
        return bool(src.partial) and not dst.partial and src.dims == dst.dims

    @cached_property
    def is_noted(self) -> bool:
        """True if a write to the operand reaches the result of the conversion only through another conversion.

        Extrema and products are joined by an operator, which saves its result for the backward pass, too.
        """
        joined = any(op in _JOINED for s in (self.src, self.dst) for _, op in s.layout.partial)
        return not joined and (self.arranges or not self.is_relabel)

    @cached_property
    def transpose(self) -> Move:
        return move(*transposed(self.src.contiguous, self.dst.contiguous))

    def of_dtype(self, dtype: torch.dtype) -> Move:
        """Return the same conversion for a tensor of another dtype."""
        return self if dtype is self.src.dtype else move(self.src.with_dtype(dtype), self.dst.with_dtype(dtype))

    def now(self, x: Tensor) -> Tensor:
        """Return `x` converted without a gradient; `x` itself if there is nothing to do."""
        return x if self.is_relabel else self._converted(x)

    def _converted(self, x: Tensor) -> Tensor:
        """Convert `x`; between meshes, a checkpointed call that runs again takes what its first run got."""
        if self.src.mesh is not self.dst.mesh and not isinstance(x, FakeTensor):
            return across_stages(partial(self._run, x))
        if modes_active() or _is_neg(x) or _is_conj(x):
            return self._run(x)
        return current_communicator().convert(self.plan, x)

    def _run(self, x: Tensor) -> Tensor:
        """Run the steps on `x` hidden from dispatch modes, since ranks need not convert by the same calls."""
        steps = partial(current_communicator().convert, self.plan)
        if isinstance(x, FakeTensor):
            return steps(x)
        with no_modes() if modes_active() else nullcontext():
            return keep_bits(steps, x)

    def __call__(self, x: Tensor) -> Tensor:
        """Return this rank's part after the conversion of its part `x`; call it with interception off."""
        if x.dtype is not self.src.dtype:
            return self.of_dtype(x.dtype)(x)
        rare = self.rare
        if rare is not None:
            return rare(x)
        grad_on = is_grad_enabled()
        if self.graded and ((grad_on and wants_grad(x)) or forward_mode()):
            return _convert(x, self)
        if self.is_relabel:
            return x
        if not grad_on:
            return self._converted(x)
        if _is_inference(x):
            with torch.inference_mode():  # so that autograd refuses to save the result
                return owned(self._converted(x))
        set_grad_enabled(False)  # torch.no_grad() takes 1 us longer
        try:
            return owned(self._converted(x))
        finally:
            set_grad_enabled(True)

    @cached_property
    def rare(self) -> Callable[[Tensor], Tensor] | None:
        """The conversion, if it does more than its steps; else None."""
        if self.is_trivial:
            return lambda x: x
        steps = partial(_special, how=self) if self.special else None
        if not self.arranges:
            return steps
        bare = steps or move(self.src, self.dst.with_strides(self.src.strides if self.is_relabel else None))
        return lambda x: arranged(bare(x), self.dst)


def _real(spec: Spec) -> Layout:
    return without_trivial_axes(spec.layout, spec.mesh.sizes)


def is_arranged(x: Tensor, spec: Spec) -> bool:
    """True if the local part has the memory format of a new tensor with this spec."""
    order = spec.new.order
    return x.is_contiguous() if order is None else x.permute(order).is_contiguous()


def arranged(x: Tensor, spec: Spec) -> Tensor:
    """Return the local part in the memory format of a new tensor with this spec; a copy if that differs."""
    if is_arranged(x, spec):
        return x
    order = spec.new.order
    if order is None:
        return x.contiguous()
    if isinstance(x, FakeTensor):  # a recorded program has no writes
        return x.permute(order).contiguous().permute(sorted(range(len(order)), key=order.__getitem__))
    strides = dense_strides(x.shape, order)
    new = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    with unwritten(new):
        return new.copy_(x)  # no view, unlike a permute


@lru_cache(maxsize=2048)
def move(src: Spec, dst: Spec) -> Move:
    """Return the conversion from `src` to `dst`."""
    return Move(src, dst)


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: TorchValue, x: Tensor, how: Move) -> Tensor:
        ctx.how = how
        keep_call_site(ctx)
        keep_number(ctx)
        if how.is_relabel:
            return _detach(x)
        out = how._converted(x)
        return _detach(x) if out is x else owned(out)  # a view would keep `x`, which may keep it

    @staticmethod
    def jvp(ctx: TorchValue, *tangents: Tensor) -> Tensor:
        (tangent, *_) = tangents
        with no_interception():
            out = ctx.how.of_dtype(tangent.dtype)(tangent)
        return out.view_as(out) if out is tangent else out

    @staticmethod
    def backward(ctx: TorchValue, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        if type(grad) is Tensor and not is_numbering():
            return ctx.how.transpose(dense_gradient(grad)), None
        with no_interception(), collectives_of_gradient(ctx):
            return ctx.how.transpose(dense_gradient(grad)), None


is_backward(_Convert.backward)
_convert: Callable[[Tensor, Move], Tensor] = bare_apply(_Convert)
bare_backward(_Convert)


def dense_gradient(grad: Tensor) -> Tensor:
    """Return the gradient with all its elements; the gradient of an embedding may omit rows that were not looked up."""
    return grad if grad.layout is torch.strided else grad.to_dense()


def owned(x: Tensor) -> Tensor:
    """Return `x` as a tensor that is no view, so that it may be written to; it keeps its memory."""
    return on_same_memory(x) if x._is_view() else x


def on_same_memory(x: Tensor) -> Tensor:
    """Return a new tensor with the memory of `x`; a tensor of inference mode if that is on."""
    return keep_bits(_on_same_memory, x)


def _on_same_memory(x: Tensor) -> Tensor:
    new = x.new_empty(0)
    with unwritten(new):
        return new.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def convert_local(x: Tensor, src: Spec, dst: Spec) -> Tensor:
    """Return this rank's part under `dst`, from its part `x` under `src`; differentiable."""
    if src is dst:
        return x
    with no_interception():
        return move(src, dst)(x)


def _special(x: Tensor, how: Move) -> Tensor:
    """Convert averages as sums, by a local division, and extrema by gathering.

    With the division every term has its own gradient. Terms of max, min and prod that need a gradient are gathered
    along a new dim and joined there by an operator whose gradient torch knows.
    """
    src, dst = how.src, how.dst
    x, src = (x / _ranks(src), _sum_for_average(src)) if _ranks(src) > 1 else (x, _sum_for_average(src))
    after = _sum_for_average(dst)
    graded = how.graded and ((x.requires_grad and torch.is_grad_enabled()) or forward_mode())
    if graded:
        x, src = _joined_by_gathering(x, src)
    if src is not after:
        step = move(src, after)
        if graded:
            x = _convert(x, step)
        else:
            with torch.no_grad():
                x = step.now(x)
    return x if after is dst else x * _ranks(dst)


def _sum_for_average(spec: Spec) -> Spec:
    if not any(op == "avg" for _, op in spec.layout.partial):
        return spec
    partial = tuple((a, "sum" if op == "avg" else op) for a, op in spec.layout.partial)
    return spec.with_layout(Layout(spec.layout.dims, partial, spec.layout.varying))


def _joined_by_gathering(x: Tensor, src: Spec) -> tuple[Tensor, Spec]:
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
    "max": lambda x: x.amax(0).clone(),
    "min": lambda x: x.amin(0).clone(),
    "prod": lambda x: x.prod(0).clone(),
}
"""Operator → the function that joins gathered terms. It copies, because autograd saves the result of the operator, and
the caller may write to the copy."""


def _ranks(spec: Spec) -> int:
    """Return the number of terms of an average."""
    total = 1
    for axis, op in spec.layout.partial:
        total *= spec.mesh.sizes[axis] if op == "avg" else 1
    return total
