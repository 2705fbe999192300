"""Local forms of reductions: each rank reduces its shard, and the results of all ranks are combined.

Every form supports sharding of any of the reduced dims: sums and gathers over an unsharded dim are the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isinf, prod

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from ..notation.dim_names import Dims, dims_of
from ..notation.local_call import LocalCall


def mean(
    call: LocalCall, x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return this rank's term of the mean: the local mean, weighted by the share of elements."""
    dims = dims_of(x, dim)
    total, mine = prod(call.total(0, d) for d in dims), prod(x.shape[d] for d in dims)
    if mine == 0 and total != 0:
        return x.sum(dims, keepdim, dtype=dtype)
    return x.mean(dims, keepdim, dtype=dtype) * (mine / total if total else 1)


def sum_over(call: LocalCall, x: Tensor, operand: int, dims: tuple[int, ...]) -> Tensor:
    """Return the sum of `x` over the ranks along the shards of the dims."""
    for d in dims:
        if call.ranks(operand, d) > 1:
            x = call.sum(x, operand, d)
    return x


def max_over(call: LocalCall, x: Tensor, operand: int, dims: tuple[int, ...]) -> Tensor:
    for d in dims:
        if call.ranks(operand, d) > 1:
            x = call.max(x, operand, d)
    return x


def lowest(dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return False
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def max_or_lowest(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the largest element along the dims, kept as dims of one; the lowest number of the dtype if there is none.

    Elements that reach it share the gradient evenly; NaN makes all gradients NaN.
    """
    if prod(x.shape[d] for d in dims):
        return x.amax(dims, keepdim=True)
    return x.sum(dims, keepdim=True, dtype=x.dtype) + lowest(x.dtype)


def max_or_nan(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the result of `max_or_lowest`, but NaN elements share the gradient of a maximum that is NaN."""
    best = max_or_lowest(x.detach(), dims)
    reached = _equal_or_nan(x.detach(), best)
    shares = x / reached.sum(dims, keepdim=True).clamp_min(1)
    value = torch.where(reached, shares, 0).sum(dims, keepdim=True, dtype=x.dtype)
    return value + torch.where(value == best, 0, best - value).detach()


def amax(call: LocalCall, x: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    """Return the maximum. All elements on all ranks that equal it share the gradient evenly."""
    dims = dims_of(x, dim)
    if not x.dtype.is_floating_point:
        return squeezed(gathered(call, max_or_lowest(x, dims), dims, lambda t: t.amax(0)), dims, keepdim)
    best = max_or_lowest(x, dims)
    return squeezed(_largest(call, best, x == best, dims), dims, keepdim)


def amax_or_nan(call: LocalCall, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Return the maximum with the gradient of `x.max()`: NaN elements share the gradient of a maximum that is NaN."""
    if not x.dtype.is_floating_point:
        return amax(call, x, dim, keepdim)
    dims = dims_of(x, dim)
    best = max_or_nan(x, dims)
    return squeezed(_largest(call, best, _equal_or_nan(x.detach(), best.detach()), dims), dims, keepdim)


def _largest(call: LocalCall, best: Tensor, reached: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the largest of the ranks' maxima; `reached` marks the elements that share its gradient."""
    ties = reached.sum(dims, keepdim=True).to(at_least_float32(best).dtype)  # half precision counts to 2048
    for d in dims:
        if call.ranks(0, d) > 1:
            best, ties = _max_and_ties(call.gather(best, 0, d), call.gather(ties, 0, d))
    return best


def _max_and_ties(tops: Tensor, ties: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best of the ranks' maxima and its number of ties, which are the ranks' shares of the gradient.

    A rank without elements has no ties: its maximum is the lowest number of the dtype, which may be the best. The
    gradient is NaN where no element equals the best, which is NaN there.
    """
    top = tops.detach().amax(0)
    ties = torch.where(_equal_or_nan(tops.detach(), top), ties, 0)
    count = ties.sum(0)
    value = (torch.where(ties > 0, tops, 0) * (ties / count.clamp_min(1))).sum(0).to(tops.dtype)
    value = value + torch.where(value == top, 0, top - value).detach()
    lost = top.isnan() & (count == 0)
    return torch.where(lost, (tops * torch.where(lost, top, 0)).sum(0), value), count


def _equal_or_nan(x: Tensor, y: Tensor) -> Tensor:
    return (x == y) | (x.isnan() & y.isnan())


def amin(call: LocalCall, x: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    return _flipped(amax, call, x, dim, keepdim)


def amin_or_nan(call: LocalCall, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return _flipped(amax_or_nan, call, x, dim, keepdim)


def _flipped(largest: Callable[..., Tensor], call: LocalCall, x: Tensor, dim: Dims, keepdim: bool) -> Tensor:
    """Return the minimum as the maximum of negated elements; ~x for integers, since -x overflows for the lowest."""
    flip = torch.neg if x.dtype.is_floating_point else torch.bitwise_not
    return flip(largest(call, flip(x), dim, keepdim))


def without_dims(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.reshape([n for d, n in enumerate(x.shape) if d not in dims])


def gathered(call: LocalCall, x: Tensor, dims: tuple[int, ...], join: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the local results of all ranks (reduced dims kept as ones), joined over every sharded dim."""
    for d in dims:
        if call.ranks(0, d) > 1:
            x = join(call.gather(x, 0, d))
    return x


def squeezed(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    return x if keepdim else without_dims(x, dims)


def product(
    call: LocalCall, x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims = dims_of(x, dim)
    for d in dims:
        x = x.prod(d, keepdim=True, dtype=dtype)
    return squeezed(gathered(call, x, dims, lambda t: t.prod(0, dtype=t.dtype)), dims, keepdim)


def logsumexp(call: LocalCall, x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """Return the log of the sum of exp, relative to the largest element of all ranks; derivatives are exact."""
    dims = dims_of(x, dim)
    x = x if x.dtype.is_floating_point or x.dtype.is_complex else x.to(torch.get_default_dtype())
    size = x.detach().real if x.dtype.is_complex else x.detach()
    limit = torch.finfo(size.dtype).max
    top = max_over(call, max_or_lowest(size, dims), 0, dims).clamp(-limit, limit)
    total = sum_over(call, (x - top).exp().sum(dims, keepdim=True), 0, dims)
    return squeezed(total.log() + top, dims, keepdim)


def vector_norm(
    call: LocalCall,
    x: Tensor,
    ord: float | None = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the norm, combined from the norms of the shards.

    Orders of infinity use the maximum or minimum of absolute values. Orders of at least two use the root of a sum of
    powers, so that second derivatives are correct if a shard is zero.
    """
    dims, p = dims_of(x, dim), 2.0 if ord is None else float(ord)
    x = x if dtype is None else x.to(dtype)
    if p == 1:
        return squeezed(sum_over(call, x.abs().sum(dims, keepdim=True), 0, dims), dims, keepdim)
    if isinf(p):
        return (amax_or_nan if p > 0 else amin_or_nan)(call, x.abs(), dims, keepdim)
    if p >= 2:
        return squeezed(_root_of_powers(call, x, p, dims), dims, keepdim)
    local = torch.linalg.vector_norm(x, p, dims, True) if x.numel() else _norm_of_nothing(x, p, dims)
    return squeezed(gathered(call, local, dims, lambda t: torch.linalg.vector_norm(t, p, 0)), dims, keepdim)


def _root_of_powers(call: LocalCall, x: Tensor, p: float, dims: tuple[int, ...]) -> Tensor:
    """Return the norm of order `p`; its gradient is zero if the norm is zero."""
    out = x.abs().dtype
    x = at_least_float32(x)
    powers = x.abs() ** p if p > 2 else (x * x.conj()).real
    total = sum_over(call, powers.sum(dims, keepdim=True), 0, dims)
    none = total == 0
    return torch.where(none, 0, torch.where(none, 1, total) ** (1 / p)).to(out)


def _norm_of_nothing(x: Tensor, p: float, dims: tuple[int, ...]) -> Tensor:
    """Return the neutral element for the norm of norms, connected to `x` in the autograd graph."""
    return x.abs().square().sum(dims, keepdim=True) + (float("inf") if p < 0 else 0)


def dist(call: LocalCall, x: Tensor, y: Tensor, p: float = 2) -> Tensor:
    return vector_norm(call, x - y, p)


def nanmean(
    call: LocalCall, x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return this rank's term: its local sum divided by the count of non-NaN elements on all ranks."""
    dims = dims_of(x, dim)
    count = sum_over(call, (~x.isnan()).sum(dims, keepdim=True).to(dtype or x.dtype), 0, dims)
    return squeezed(x.nansum(dims, keepdim=True, dtype=dtype) / count, dims, keepdim)


def moments(
    call: LocalCall,
    x: Tensor,
    dim: Dims = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor, tuple[int, ...], bool]:
    """Return this rank's term of the variance, the mean, the reduced dims, and `keepdim`."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dims = dims_of(x, dim)
    count = prod(call.total(0, d) for d in dims)
    less = correction if correction is not None else float(unbiased is not False)
    mean = sum_over(call, x.sum(dims, keepdim=True), 0, dims) / count
    off = x - mean
    square = (off * off.conj()).real if x.is_complex() else off.square()
    return square.sum(dims, keepdim=True) / max(0, count - less), mean, dims, keepdim


def var(call: LocalCall, x: Tensor, *args: TorchValue, **kwargs: TorchValue) -> Tensor:
    term, _, dims, keepdim = moments(call, x, *args, **kwargs)
    return squeezed(term, dims, keepdim)


def var_mean(call: LocalCall, x: Tensor, *args: TorchValue, **kwargs: TorchValue) -> tuple[Tensor, Tensor]:
    """Return this rank's terms of variance and mean; the mean is divided evenly among the ranks."""
    term, mean, dims, keepdim = moments(call, x, *args, **kwargs)
    ranks = prod(call.ranks(0, d) for d in dims)
    return squeezed(term, dims, keepdim), squeezed(mean / ranks, dims, keepdim)


def std(call: LocalCall, x: Tensor, *args: TorchValue, **kwargs: TorchValue) -> Tensor:
    return std_mean(call, x, *args, **kwargs)[0]


def std_mean(call: LocalCall, x: Tensor, *args: TorchValue, **kwargs: TorchValue) -> tuple[Tensor, Tensor]:
    """Return standard deviation and mean. The root of a zero variance has a zero gradient, as in torch."""
    term, mean, dims, keepdim = moments(call, x, *args, **kwargs)
    variance = sum_over(call, term, 0, dims)
    root = torch.where(variance == 0, 0, torch.where(variance == 0, 1, variance).sqrt())
    return squeezed(root, dims, keepdim), squeezed(mean, dims, keepdim)


def max_along(call: LocalCall, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return maximum and index; among equal maxima, that of the first rank."""
    return _along(call, x, dim, keepdim, False)


def min_along(call: LocalCall, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _along(call, x, dim, keepdim, True)


def argmax(call: LocalCall, x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return _along(call, x.detach(), dim, keepdim, False)[1]


def argmin(call: LocalCall, x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return _along(call, x.detach(), dim, keepdim, True)[1]


def _along(call: LocalCall, x: Tensor, dim: int, keepdim: bool, least: bool) -> tuple[Tensor, Tensor]:
    (at,) = dims = dims_of(x, dim)
    if x.shape[at]:
        value, where = x.min(at, True) if least else x.max(at, True)
    else:
        value = x.sum(at, True, dtype=x.dtype) + (highest(x.dtype) if least else lowest(x.dtype))
        where = torch.zeros_like(value, dtype=torch.int64)
    values, places = call.gather(value, 0, at), call.gather(where + call.start(0, at), 0, at)
    best, winner = values.min(0) if least else values.max(0)
    return squeezed(best, dims, keepdim), squeezed(places.gather(0, winner.unsqueeze(0)).squeeze(0), dims, keepdim)


def highest(dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32 if it is in half precision, since torch's kernels sum in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def softmax(call: LocalCall, x: Tensor, dim: int, dtype: torch.dtype | bool | None = None) -> Tensor:
    """Compute softmax along a sharded dim, with one maximum and one sum over the ranks."""
    x, dims = _as_type(x, dtype), dims_of(x, dim)
    e = _below_maximum(call, x, dims).exp()
    return (e / sum_over(call, e.sum(dims, keepdim=True), 0, dims)).to(x.dtype)


def log_softmax(call: LocalCall, x: Tensor, dim: int, dtype: torch.dtype | bool | None = None) -> Tensor:
    x, dims = _as_type(x, dtype), dims_of(x, dim)
    y = _below_maximum(call, x, dims)
    return (y - sum_over(call, y.exp().sum(dims, keepdim=True), 0, dims).log()).to(x.dtype)


def _below_maximum(call: LocalCall, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return `x` minus the largest element along the dims, of all ranks, in at least float32."""
    y = at_least_float32(x)
    return y - max_over(call, max_or_lowest(y.detach(), dims), 0, dims)


def _as_type(x: Tensor, dtype: torch.dtype | bool | None) -> Tensor:
    """Return `x` in `dtype`. For `_softmax`, `dtype` is a bool: True converts half precision to float32."""
    if isinstance(dtype, bool):
        return x.float() if dtype else x
    return x if dtype is None else x.to(dtype)


def layer_norm(
    call: LocalCall,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    dims = tuple(range(x.dim() - len(normalized_shape), x.dim()))
    count = prod(normalized_shape)
    y = at_least_float32(x)
    y = y - sum_over(call, y.sum(dims, keepdim=True), 0, dims) / count
    variance = sum_over(call, y.square().sum(dims, keepdim=True), 0, dims) / count
    return scale_and_shift(y * (variance + eps).rsqrt(), weight, bias).to(x.dtype)


def rms_norm(
    call: LocalCall, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    dims = tuple(range(x.dim() - len(normalized_shape), x.dim()))
    y = at_least_float32(x)
    square = sum_over(call, y.square().sum(dims, keepdim=True), 0, dims) / prod(normalized_shape)
    small = torch.finfo(y.dtype).eps if eps is None else eps
    return scale_and_shift(y * (square + small).rsqrt(), weight, None).to(x.dtype)


def scale_and_shift(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def cumsum(call: LocalCall, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the local running sum plus the totals of the shards before this one."""
    (at,) = dims_of(x, dim)
    mine = x.cumsum(at, dtype=dtype)
    totals = call.gather(x.to(mine.dtype).sum(at, keepdim=True, dtype=mine.dtype), 0, at)
    return mine + torch.where(_before(call, totals, at), totals, 0).sum(0, dtype=mine.dtype)


def cumprod(call: LocalCall, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    (at,) = dims_of(x, dim)
    mine = x.cumprod(at, dtype=dtype)
    totals = call.gather(x.to(mine.dtype).prod(at, keepdim=True, dtype=mine.dtype), 0, at)
    return mine * torch.where(_before(call, totals, at), totals, 1).prod(0, dtype=mine.dtype)


def _before(call: LocalCall, totals: Tensor, at: int) -> Tensor:
    """Return a mask of the totals of shards before this rank's.

    It is computed by tensor operations, since a Python number would be valid for one rank only.
    """
    places = torch.arange(totals.shape[0], device=totals.device) - call.index(0, at)
    return (places < 0).reshape(-1, *[1] * (totals.dim() - 1))
