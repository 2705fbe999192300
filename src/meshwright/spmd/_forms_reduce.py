"""Second forms of reductions: what each rank computes of its piece, and how the pieces come together.

Every form serves whichever of the reduced dims are cut: sums and gathers over an uncut dim are the value itself.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isinf, prod
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
    return squeezed(best, dims, keepdim)


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


def gathered(call: LocalCall, x: Tensor, dims: tuple[int, ...], join: Callable[[Tensor], Tensor]) -> Tensor:
    """What the ranks made of their pieces (dims kept as ones), joined over every cut dim."""
    for d in dims:
        if call.ranks(0, d) > 1:
            x = join(call.gather(x, 0, d))
    return x


def squeezed(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    return x if keepdim else without_dims(x, dims)


def product(call: LocalCall, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    dims = dims_at(dim, x.dim())
    for d in dims:
        x = x.prod(d, keepdim=True, dtype=dtype)
    return squeezed(gathered(call, x, dims, lambda t: t.prod(0)), dims, keepdim)


def logsumexp(call: LocalCall, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    dims = dims_at(dim, x.dim())
    return squeezed(gathered(call, x.logsumexp(dims, True), dims, lambda t: t.logsumexp(0)), dims, keepdim)


def vector_norm(
    call: LocalCall, x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """The norm of the pieces' norms; for the norms that are a maximum or a minimum, that of the absolute values."""
    dims, p = dims_at(dim, x.dim()), 2.0 if ord is None else float(ord)
    x = x if dtype is None else x.to(dtype)
    if isinf(p):
        return (amax if p > 0 else amin)(call, x.abs(), dims, keepdim)
    local = torch.linalg.vector_norm(x, p, dims, True) if x.numel() else _norm_of_nothing(x, p, dims)
    return squeezed(gathered(call, local, dims, lambda t: torch.linalg.vector_norm(t, p, 0)), dims, keepdim)


def _norm_of_nothing(x: Tensor, p: float, dims: tuple[int, ...]) -> Tensor:
    """What leaves the norm of the others' norms as it is, behind `x` in the autograd graph."""
    return x.abs().square().sum(dims, keepdim=True) + (float("inf") if p < 0 else 0)


def dist(call: LocalCall, x: Tensor, y: Tensor, p: float = 2) -> Tensor:
    return vector_norm(call, x - y, p)


def nanmean(call: LocalCall, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """This rank's term: its own sum over the number of all ranks' numbers."""
    dims = dims_at(dim, x.dim())
    count = sum_over(call, (~x.isnan()).sum(dims, keepdim=True).to(dtype or x.dtype), 0, dims)
    return squeezed(x.nansum(dims, keepdim=True, dtype=dtype) / count, dims, keepdim)


def frobenius_norm(call: LocalCall, x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    return vector_norm(call, x, 2, dim, keepdim)


def moments(
    call: LocalCall, x: Tensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> tuple[Tensor, Tensor, tuple[int, ...], bool]:
    """This rank's term of the variance, the mean, the dims they are taken along, and whether these are kept."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dims = dims_at(dim, x.dim())
    count = prod(call.total(0, d) for d in dims)
    less = correction if correction is not None else float(unbiased is not False)
    mean = sum_over(call, x.sum(dims, keepdim=True), 0, dims) / max(count, 1)
    off = x - mean
    square = (off * off.conj()).real if x.is_complex() else off.square()
    return square.sum(dims, keepdim=True) / max(count - less, 0), mean, dims, keepdim


def var(call: LocalCall, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    term, _, dims, keepdim = moments(call, x, *args, **kwargs)
    return squeezed(term, dims, keepdim)


def var_mean(call: LocalCall, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Terms of both: each rank has an equal share of the mean."""
    term, mean, dims, keepdim = moments(call, x, *args, **kwargs)
    ranks = prod(call.ranks(0, d) for d in dims)
    return squeezed(term, dims, keepdim), squeezed(mean / ranks, dims, keepdim)


def std(call: LocalCall, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return std_mean(call, x, *args, **kwargs)[0]


def std_mean(call: LocalCall, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The root of a variance of zero has no gradient, as in torch."""
    term, mean, dims, keepdim = moments(call, x, *args, **kwargs)
    variance = sum_over(call, term, 0, dims)
    root = torch.where(variance == 0, 0, torch.where(variance == 0, 1, variance).sqrt())
    return squeezed(root, dims, keepdim), squeezed(mean, dims, keepdim)


def max_along(call: LocalCall, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Values and indices: the first rank that reaches the maximum holds it."""
    return _along(call, x, dim, keepdim, False)


def min_along(call: LocalCall, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _along(call, x, dim, keepdim, True)


def argmax(call: LocalCall, x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return _along(call, x.detach(), dim, keepdim, False)[1]


def argmin(call: LocalCall, x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return _along(call, x.detach(), dim, keepdim, True)[1]


def _along(call: LocalCall, x: Tensor, dim: int, keepdim: bool, least: bool) -> tuple[Tensor, Tensor]:
    (at,) = dims = dims_at(dim, x.dim())
    if x.shape[at]:
        value, where = x.min(at, True) if least else x.max(at, True)
    else:
        value = x.sum(at, True, dtype=x.dtype) + (highest(x.dtype) if least else lowest(x.dtype))
        where = torch.zeros_like(value, dtype=torch.int64)
    values, places = call.gather(value, 0, at), call.gather(where + call.start(0, at), 0, at)
    best, winner = values.min(0) if least else values.max(0)
    return squeezed(best, dims, keepdim), squeezed(places.gather(0, winner.unsqueeze(0)).squeeze(0), dims, keepdim)


def highest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def wide(x: Tensor) -> Tensor:
    """Half precision is summed in single, as torch's own kernels do."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def softmax(call: LocalCall, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """Softmax along a cut dim: one maximum and one sum over the ranks."""
    x, dims = _as_type(x, dtype), dims_at(dim, x.dim())
    e = wide(x)
    e = (e - max_over(call, peak(e.detach(), dims), 0, dims)).exp()
    return (e / sum_over(call, e.sum(dims, keepdim=True), 0, dims)).to(x.dtype)


def log_softmax(call: LocalCall, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    x, dims = _as_type(x, dtype), dims_at(dim, x.dim())
    y = wide(x)
    y = y - max_over(call, peak(y.detach(), dims), 0, dims)
    return (y - sum_over(call, y.exp().sum(dims, keepdim=True), 0, dims).log()).to(x.dtype)


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
    y = wide(x)
    y = y - sum_over(call, y.sum(dims, keepdim=True), 0, dims) / count
    variance = sum_over(call, y.square().sum(dims, keepdim=True), 0, dims) / count
    return scaled(y * (variance + eps).rsqrt(), weight, bias).to(x.dtype)


def rms_norm(
    call: LocalCall, x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    dims = tuple(range(x.dim() - len(normalized_shape), x.dim()))
    y = wide(x)
    square = sum_over(call, y.square().sum(dims, keepdim=True), 0, dims) / prod(normalized_shape)
    small = torch.finfo(y.dtype).eps if eps is None else eps
    return scaled(y * (square + small).rsqrt(), weight, None).to(x.dtype)


def scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def cumsum(call: LocalCall, x: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    """The running sum of the piece, and the totals of the pieces before it."""
    (at,) = dims_at(dim, x.dim())
    mine = x.cumsum(at, dtype=dtype)
    totals = call.gather(x.sum(at, keepdim=True, dtype=mine.dtype), 0, at)
    return mine + torch.where(_before(call, totals, at), totals, 0).sum(0, dtype=mine.dtype)


def cumprod(call: LocalCall, x: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    (at,) = dims_at(dim, x.dim())
    mine = x.cumprod(at, dtype=dtype)
    totals = call.gather(x.prod(at, keepdim=True, dtype=mine.dtype), 0, at)
    return mine * torch.where(_before(call, totals, at), totals, 1).prod(0, dtype=mine.dtype)


def _before(call: LocalCall, totals: Tensor, at: int) -> Tensor:
    """Which of the ranks' totals belong to pieces before this rank's; numbers of Python would be one rank's only."""
    places = torch.arange(totals.shape[0], device=totals.device) - call.index(0, at)
    return (places < 0).reshape(-1, *[1] * (totals.dim() - 1))
