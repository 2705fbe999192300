"""Second forms of reductions: what each rank computes of its piece, and how the pieces come together.

Every form serves whichever of the reduced dims are cut: sums and gathers over an uncut dim are the value itself.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ._forms import LocalCall
from ._rules_dims import dims_at


def mean(call: LocalCall, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """This rank's term of the mean: its own mean, weighted by its share of the elements."""
    dims = dims_at(dim, x.dim())
    total, mine = prod(call.total(0, d) for d in dims), prod(x.shape[d] for d in dims)
    if mine == 0 and total != 0:
        return x.sum(dims, keepdim, dtype=dtype)
    return x.mean(dims, keepdim, dtype=dtype) * (mine / total if total else 1)


def sum_over(call: LocalCall, x: Tensor, operand: int, dims: tuple[int, ...]) -> Tensor:
    """The sum of `x` over the ranks that hold pieces of any of the dims."""
    for d in dims:
        if call.ranks(operand, d) > 1:
            x = call.sum(x, operand, d)
    return x


def max_over(call: LocalCall, x: Tensor, operand: int, dims: tuple[int, ...]) -> Tensor:
    for d in dims:
        if call.ranks(operand, d) > 1:
            x = call.max(x, operand, d)
    return x


def lowest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return False
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def peak(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest element along the dims, kept as dims of one; the lowest number there is where there is none."""
    if prod(x.shape[d] for d in dims):
        return x.amax(dims, keepdim=True)
    return x.sum(dims, keepdim=True, dtype=x.dtype) + lowest(x.dtype)


def amax(call: LocalCall, x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    """The maximum, with the gradient shared evenly among all elements that reach it, wherever they are."""
    dims = dims_at(dim, x.dim())
    best = peak(x, dims)
    if not x.dtype.is_floating_point:
        for d in dims:
            best = call.gather(best, 0, d).amax(0) if call.ranks(0, d) > 1 else best
    else:
        ties = (x == best).sum(dims, keepdim=True).to(x.dtype)
        for d in dims:
            if call.ranks(0, d) > 1:
                best, ties = _best(call.gather(best, 0, d), call.gather(ties, 0, d))
    return best if keepdim else without_dims(best, dims)


def _best(tops: Tensor, ties: Tensor) -> tuple[Tensor, Tensor]:
    """The best of the ranks' maxima; each rank's share of the gradient is its number of ties."""
    top = tops.detach().amax(0)
    ties = torch.where(tops == top, ties, 0)
    count = ties.sum(0)
    value = (torch.where(tops == top, tops, 0) * ties / count).sum(0)
    return value + torch.where(value == top, 0, top - value).detach(), count


def amin(call: LocalCall, x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    flip = torch.neg if x.dtype.is_floating_point else torch.bitwise_not
    return flip(amax(call, flip(x), dim, keepdim))


def without_dims(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.reshape([n for d, n in enumerate(x.shape) if d not in dims])


def softmax(call: LocalCall, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """Softmax along a cut dim: one maximum and one sum over the ranks."""
    x, dims = _as_type(x, dtype), dims_at(dim, x.dim())
    e = (x - max_over(call, peak(x.detach(), dims), 0, dims)).exp()
    return e / sum_over(call, e.sum(dims, keepdim=True), 0, dims)


def log_softmax(call: LocalCall, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    x, dims = _as_type(x, dtype), dims_at(dim, x.dim())
    x = x - max_over(call, peak(x.detach(), dims), 0, dims)
    return x - sum_over(call, x.exp().sum(dims, keepdim=True), 0, dims).log()


def _as_type(x: Tensor, dtype: Any) -> Tensor:
    """`_softmax` has a bool in the place of the dtype: half to float."""
    if isinstance(dtype, bool):
        return x.float() if dtype else x
    return x if dtype is None else x.to(dtype)


def layer_norm(
    call: LocalCall, x: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    dims = tuple(range(x.dim() - len(normalized_shape), x.dim()))
    count = prod(normalized_shape)
    x = x - sum_over(call, x.sum(dims, keepdim=True), 0, dims) / count
    variance = sum_over(call, x.square().sum(dims, keepdim=True), 0, dims) / count
    return scaled(x * (variance + eps).rsqrt(), weight, bias)


def rms_norm(
    call: LocalCall, x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    dims = tuple(range(x.dim() - len(normalized_shape), x.dim()))
    square = sum_over(call, x.square().sum(dims, keepdim=True), 0, dims) / prod(normalized_shape)
    return scaled(x * (square + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt(), weight, None)


def scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def cumsum(call: LocalCall, x: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    """The running sum of the piece, and the totals of the pieces before it."""
    (at,) = dims_at(dim, x.dim())
    before = call.gather(x.sum(at, keepdim=True, dtype=dtype), 0, at)[: call.index(0, at)].sum(0)
    return x.cumsum(at, dtype=dtype) + before.to(x.cumsum(at, dtype=dtype).dtype)


def cumprod(call: LocalCall, x: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    (at,) = dims_at(dim, x.dim())
    before = call.gather(x.prod(at, keepdim=True, dtype=dtype), 0, at)[: call.index(0, at)].prod(0)
    return x.cumprod(at, dtype=dtype) * before
