"""Functions whose gradients are sums in a fixed order; they see whole tensors, in both passes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.layout import Layout, TorchValue
from meshwright.tensor import DistTensor, in_capture, redistribute

from . import operators
from .microbatches import pieces_along_batch


class _Unsaved(SimpleNamespace):
    """The context of a call without a gradient."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        pass


class _OnWholeTensors(torch.autograd.Function):
    """A function whose two passes see distributed tensors, as those of a user's function do."""

    sees_whole_tensors = True

    @classmethod
    def of(cls, *args: TorchValue) -> Tensor:
        """Return the result; without a node of autograd if no gradient is wanted.

        A capture gets the call as one node in any case: the pieces follow from the layouts of a later recording.
        """
        is_graded = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)
        if is_graded or in_capture():
            return cls.apply(*args)
        return cls.forward(_Unsaved(), *args)


class Product(_OnWholeTensors):
    """`x @ w` for a matrix `w`, or `x @ w.T` if it is transposed."""

    @staticmethod
    def forward(ctx: TorchValue, x: Tensor, w: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.transposed, ctx.reads_batch = transposed, not isinstance(x, nn.Parameter)
        return operators.product(x, w, transposed)

    @staticmethod
    def backward(ctx: TorchValue, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), (grad,) = ctx.saved_tensors, grads
        of_x = operators.product(grad, w, not ctx.transposed) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_x, None, None
        pieces = pieces_along_batch(x, prod(x.shape[:-1])) if ctx.reads_batch else None
        left, right = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        if ctx.transposed:
            left, right = right, left
        return of_x, operators.product(left.t(), right, pieces=pieces), None


class BatchedProduct(_OnWholeTensors):
    """`x @ y` for tensors of equal leading dims."""

    @staticmethod
    def forward(ctx: TorchValue, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return operators.batched_product(x, y)

    @staticmethod
    def backward(ctx: TorchValue, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, y), (grad,) = ctx.saved_tensors, grads
        of_x = operators.batched_product(grad, y.mT) if ctx.needs_input_grad[0] else None
        return of_x, operators.batched_product(x.mT, grad) if ctx.needs_input_grad[1] else None


class Total(_OnWholeTensors):
    """The sum along one dim, which is kept."""

    @staticmethod
    def forward(ctx: TorchValue, x: Tensor, dim: int, pieces: int | None) -> Tensor:
        ctx.shape = x.shape
        return operators.total(x, dim, pieces).unsqueeze(dim)

    @staticmethod
    def backward(ctx: TorchValue, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].expand(ctx.shape), None, None


class Spread(_OnWholeTensors):
    """A tensor broadcast to the shape and the layout of another one; its gradient is a sum in a fixed order."""

    @staticmethod
    def forward(ctx: TorchValue, x: Tensor, like: Tensor) -> Tensor:
        ctx.shape = x.shape
        out = x.expand(like.shape)
        if not isinstance(out, DistTensor) or not isinstance(like, DistTensor):
            return out
        return redistribute(out, like.mesh, Layout(like.spec.layout.dims))

    @staticmethod
    def backward(ctx: TorchValue, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return summed_to(grads[0], ctx.shape), None


def _sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid, in the memory of one tensor: new memory of a large tensor takes longer than its elements."""
    return (-x).exp_().add_(1).reciprocal_()


class Sigmoid(_OnWholeTensors):
    """The sigmoid of float32; its own derivative takes fewer operators than those of its operators."""

    @staticmethod
    def forward(ctx: TorchValue, x: Tensor) -> Tensor:
        out = _sigmoid(x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: TorchValue, *grads: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grads[0] * (1 - out).mul_(out)


class Silu(_OnWholeTensors):
    """`x * sigmoid(x)` in float32."""

    @staticmethod
    def forward(ctx: TorchValue, x: Tensor) -> Tensor:
        sigmoid = _sigmoid(x)
        ctx.save_for_backward(x, sigmoid)
        return x * sigmoid

    @staticmethod
    def backward(ctx: TorchValue, *grads: Tensor) -> Tensor:
        x, sigmoid = ctx.saved_tensors
        return grads[0] * (1 - sigmoid).mul_(x).add_(1).mul_(sigmoid)


class Embedding(_OnWholeTensors):
    """The rows of a table; its gradient adds up the rows of the tokens, piece by piece."""

    @staticmethod
    def forward(ctx: TorchValue, table: Tensor, ids: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.size, ctx.padding = table.shape[0], padding
        return operators.settled(F.embedding(ids, table))

    @staticmethod
    def backward(ctx: TorchValue, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), (grad,) = ctx.saved_tensors, grads
        if ctx.padding is not None:
            grad = grad * (ids != ctx.padding).unsqueeze(-1)
        pieces = pieces_along_batch(ids, ids.numel()) if ids.dim() else None
        rows = grad.reshape(-1, grad.shape[-1])
        return operators.scatter(rows, ids.reshape(-1), ctx.size, pieces), None, None


def summed_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `x` summed over the dims along which a tensor of this shape was broadcast to it."""
    ahead = x.dim() - len(shape)
    for at in reversed(range(x.dim())):
        pieces = None if at else pieces_along_batch(x, x.shape[0])
        if at < ahead:
            x = operators.total(x, at, pieces)
        elif shape[at - ahead] == 1 != x.shape[at]:
            x = operators.total(x, at, pieces).unsqueeze(at)
    return x
