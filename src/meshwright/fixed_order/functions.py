"""Replacements of torch's functions: the same results up to rounding, by sums in a fixed order.

Each replacement takes the arguments of the function that it replaces. Softmax, norms and losses are written by exact
elementwise operators and `total`, so that autograd derives their gradients. Functions whose kernels round the last
elements of a tensor in another way than the others, such as `sigmoid`, are written by functions that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod, sqrt

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from ._errors import refusal
from .derivatives import BatchedProduct, Embedding, Product, Sigmoid, Silu, Spread, Total
from .kernels import accurate
from .operators import settled


def spread(x: Tensor, like: Tensor) -> Tensor:
    """Return `x`, which broadcasts to `like`; with the shape of `like` if it has a gradient, which is a sum."""
    is_graded = x.requires_grad and torch.is_grad_enabled()
    return Spread.apply(x, like) if is_graded and x.shape != like.shape else x


def total(x: Tensor, dims: Sequence[int] | None = None, pieces: int | None = None) -> Tensor:
    """Return the sum over the dims, all of them by default; the dims are kept."""
    for dim in reversed(range(x.dim())) if dims is None else sorted((d % x.dim() for d in dims), reverse=True):
        x = Total.of(x, dim, pieces)
    return x


def _scaled(x: Tensor, like: Tensor, by: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return by(like, spread(x, like))


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.dim() == 1:
        return linear(input, weight.unsqueeze(0), bias).squeeze(-1)
    _check_product("linear", input)
    out = Product.of(input, weight, True)
    return out if bias is None else out + spread(bias, out)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    _check_product("matmul", x)
    if x.dim() == 1:
        return matmul(x.unsqueeze(0), y).squeeze(-1 if y.dim() == 1 else -2)
    if y.dim() == 1:
        return matmul(x, y.unsqueeze(-1)).squeeze(-1)
    if y.dim() == 2:
        return Product.of(x, y, False)
    if x.shape[:-2] == y.shape[:-2]:
        return BatchedProduct.of(x, y)
    lead = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return BatchedProduct.of(*(_with_lead(t, o, lead) for t, o in ((x, y), (y, x))))


def _with_lead(x: Tensor, other: Tensor, lead: torch.Size) -> Tensor:
    if x.shape[:-2] == lead:
        return x
    if other.shape[:-2] != lead:
        return Spread.apply(x, x.detach().expand(*lead, *x.shape[-2:]))
    return Spread.apply(x, other.detach()[..., :1, :1].expand(*lead, *x.shape[-2:]))


def addmm(input: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    out = matmul(x, y)
    out = out if alpha == 1 else out * alpha
    return spread(input if beta == 1 else input * beta, out) + out


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    _check_absent("embedding", max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
    padding = None if padding_idx is None else padding_idx % weight.shape[0]
    return Embedding.of(weight, input, padding)


def sum_of(input: Tensor, dim: TorchValue = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    x = input if dtype is None else input.to(dtype)
    if not x.dtype.is_floating_point:
        return torch.sum(input, dim, keepdim, dtype=dtype)
    dims = _dims(x, dim)
    out = total(x, dims)
    return out if keepdim else _without(out, dims)


def mean(input: Tensor, dim: TorchValue = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    x = input if dtype is None else input.to(dtype)
    if not x.dtype.is_floating_point:
        return torch.mean(x, dim, keepdim)
    count = prod(x.shape[d] for d in _dims(x, dim))
    return (sum_of(accurate(x), dim, keepdim) / count).to(x.dtype)


def var(
    input: Tensor,
    dim: TorchValue = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor:
    if isinstance(dim, bool):  # var(x, unbiased)
        dim, unbiased = None, dim
    x, dims = accurate(input), _dims(input, dim)
    x = _scaled(mean(x, dims, True), x, torch.sub)
    lost = float(unbiased) if correction is None else correction
    count = max(prod(x.shape[d] for d in dims) - lost, 0.0)
    squares = sum_of(x * x, dims, keepdim)
    return (squares / count if count else squares * torch.inf).to(input.dtype)


def std(input: Tensor, *args: TorchValue, **kwargs: TorchValue) -> Tensor:
    return var(accurate(input), *args, **kwargs).sqrt().to(input.dtype)


def vector_norm(
    x: Tensor, ord: float = 2, dim: TorchValue = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if ord != 2:
        raise refusal(f"a norm of order {ord}", "sums of other powers than squares have no fixed order yet")
    out = x.dtype if dtype is None else dtype
    x = accurate(x.to(out))
    squares = sum_of(x * x, dim, keepdim)
    return torch.where(squares == 0, 0, squares).sqrt().to(out)  # a norm of zero has the gradient zero


def foreach_norm(tensors: Sequence[Tensor], ord: float = 2, *rest: TorchValue) -> list[Tensor]:
    return [vector_norm(x, ord) for x in tensors]


def _dims(x: Tensor, dim: TorchValue) -> list[int]:
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return list(range(x.dim()))
    return [d % max(x.dim(), 1) for d in ([dim] if isinstance(dim, int) else dim)]


def _without(x: Tensor, dims: Sequence[int]) -> Tensor:
    for d in sorted(dims, reverse=True):
        x = x.squeeze(d)
    return x


def softmax(input: Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """Return softmax, with a sum that zeros at the end of the dim do not change."""
    out = input.dtype if dtype is None else dtype
    e, sums = _exponentials(accurate(input if dtype is None else input.to(dtype)), dim)
    return _scaled(sums, e, torch.div).to(out)


def _exponentials(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return numerators and denominators of softmax. A row of minus infinity has the denominator 0."""
    top = x.detach().amax(dim, keepdim=True)
    e = _scaled(torch.where(top == -torch.inf, 0, top), x, torch.sub).exp()
    return e, total(e, [dim], 1)


def log_softmax(input: Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    x = input if dtype is None else input.to(dtype)
    y = accurate(x)
    y = _scaled(y.detach().amax(dim, keepdim=True), y, torch.sub)
    return _scaled(total(y.exp(), [dim]).log(), y, torch.sub).to(x.dtype)


def logsumexp(input: Tensor, dim: TorchValue, keepdim: bool = False) -> Tensor:
    dims = _dims(input, dim)
    x = accurate(input)
    top = x.detach().amax(dims, keepdim=True)
    top = torch.where(top.isinf(), 0, top)
    out = (total(_scaled(top, x, torch.sub).exp(), dims).log() + top).to(input.dtype)
    return out if keepdim else _without(out, dims)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    _check_absent(
        "cross_entropy", weight=weight, size_average=size_average, reduce=reduce, label_smoothing=label_smoothing
    )
    if target.dtype.is_floating_point:
        raise refusal("cross_entropy of probabilities", "only targets that are classes have a fixed order")
    return nll_loss(
        log_softmax(accurate(input), min(input.dim() - 1, 1)), target, None, None, ignore_index, None, reduction
    ).to(input.dtype)


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    _check_absent("nll_loss", weight=weight, size_average=size_average, reduce=reduce)
    c, counts = min(input.dim() - 1, 1), target != ignore_index
    index = torch.where(counts, target, 0).unsqueeze(c)
    losses = torch.where(counts, -settled(input.gather(c, index)).squeeze(c), 0)
    if reduction == "none":
        return losses
    out = sum_of(losses)
    return out / counts.sum() if reduction == "mean" else out


def mse_loss(input: Tensor, target: Tensor, *rest: TorchValue, reduction: str = "mean", **kwargs: TorchValue) -> Tensor:
    _check_absent("mse_loss", positional=rest, **kwargs)
    if input.shape != target.shape:
        raise refusal("mse_loss of different shapes", "the gradient of an operand that broadcasts is a sum; expand it")
    off = input - target
    squares = off * off
    if reduction == "none":
        return squares
    return mean(squares) if reduction == "mean" else sum_of(squares)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    x, dims = accurate(input), list(range(-len(normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    out = _scaled((mean(x * x, dims, True) + eps).sqrt().reciprocal(), x, torch.mul)
    return (out if weight is None else out * spread(weight, out)).to(input.dtype)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    dims = list(range(-len(normalized_shape), 0))
    x = accurate(input)
    x = _scaled(mean(x, dims, True), x, torch.sub)
    out = rms_norm(x, normalized_shape, weight, eps)
    return (out if bias is None else out + spread(bias, out)).to(input.dtype)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention: scores, softmax and a product whose contraction is in blocks of 32 keys."""
    if query.dim() == 2:
        q, k, v = (x.unsqueeze(0) for x in (query, key, value))
        return attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa).squeeze(0)
    if enable_gqa:
        key, value = (_repeated(x, query.shape[-3] // x.shape[-3]) for x in (key, value))
    scores = matmul(query, key.mT) * (1 / sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal and attn_mask is not None:
        raise refusal("attention with is_causal and a mask", "torch allows one of both")
    if is_causal:
        rows, keys = scores.shape[-2:]
        attn_mask = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril()
    weights = softmax(scores, -1) if attn_mask is None else _masked_softmax(scores, attn_mask)
    return matmul(torch.dropout(weights, dropout_p, dropout_p > 0), value)


def _masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Return the softmax of masked scores; a row that attends to nothing is zero."""
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    else:
        scores = scores + spread(mask, scores)
    e, sums = _exponentials(accurate(scores), -1)
    return _scaled(torch.where(sums == 0, 1, sums), e, torch.div).to(scores.dtype)


def _repeated(x: Tensor, times: int) -> Tensor:
    """Return each head `times` times."""
    if times == 1:
        return x
    x = x.unsqueeze(-3)
    return expand(x, *x.shape[:-3], times, *x.shape[-2:]).flatten(-4, -3)


def expand(x: Tensor, *sizes: TorchValue, size: TorchValue = None, implicit: bool = False) -> Tensor:
    like = x.detach().expand(*sizes) if size is None else x.detach().expand(size)
    return Spread.apply(x, like) if x.requires_grad and torch.is_grad_enabled() else like


def sigmoid(input: Tensor) -> Tensor:
    x = _floating(input)
    return Sigmoid.of(accurate(x)).to(x.dtype)


def _floating(x: Tensor) -> Tensor:
    """Return `x` in floating point, as functions do that have no results in integers."""
    return x if x.dtype.is_floating_point else x.to(torch.get_default_dtype())


def _minus_magnitude(x: Tensor) -> Tensor:
    """Return `-x.abs()`, with the gradient -1 at zero; that of `abs` is 0 there."""
    return torch.where(x >= 0, -x, x)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    _check_absent("silu", inplace=inplace)
    return Silu.of(accurate(input)).to(input.dtype)


def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    x = accurate(input) * beta
    smooth = x.clamp_min(0) + _minus_magnitude(x).exp().log1p()
    return (torch.where(x > threshold, x, smooth) / beta).to(input.dtype)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    x = accurate(input)
    if approximate == "tanh":
        inner = (x + x * x * x * 0.044715) * sqrt(2 / torch.pi)
        return (x * ((1 + inner.tanh()) * 0.5)).to(input.dtype)
    return (x * ((1 + (x * sqrt(0.5)).erf()) * 0.5)).to(input.dtype)


EXPONENTS = (0.5, 1, 2, 3)
"""Exponents of `power`."""


def power(input: TorchValue, exponent: TorchValue) -> Tensor:
    if not isinstance(input, Tensor) or not isinstance(exponent, (int, float)) or exponent not in EXPONENTS:
        raise refusal("pow with this exponent", "kernels round it in several ways; 0.5, 1, 2 and 3 are exact")
    return input.sqrt() if exponent == 0.5 else torch.pow(input, exponent)


def rsqrt(input: Tensor) -> Tensor:
    x = _floating(input)
    return accurate(x).sqrt().reciprocal().to(x.dtype)


def _check_product(name: str, x: Tensor) -> None:
    if x.dtype in (torch.float64, torch.complex64, torch.complex128):
        raise refusal(f"{name} in {x.dtype}", "its kernels compute an element from other columns too; use float32")
    if torch.is_autocast_enabled(x.device.type):
        raise refusal(f"{name} under autocast", "its replacement does not convert operands; convert the model instead")


def _check_absent(name: str, **options: object) -> None:
    """Raise SameNumbersError for options that are set."""
    for option, value in options.items():
        if isinstance(value, Tensor) or value:
            raise refusal(f"{name} with {option}", "it has no form with a fixed order")


REPLACED: dict[str, Callable[..., TorchValue]] = {
    "linear": linear,
    "matmul": matmul,
    "mm": matmul,
    "bmm": matmul,
    "rmatmul": lambda x, y: matmul(y, x),
    "addmm": addmm,
    "embedding": embedding,
    "sum": sum_of,
    "mean": mean,
    "var": var,
    "std": std,
    "vector_norm": vector_norm,
    "linalg_vector_norm": vector_norm,
    "_foreach_norm": foreach_norm,
    "softmax": softmax,
    "log_softmax": log_softmax,
    "logsumexp": logsumexp,
    "cross_entropy": cross_entropy,
    "nll_loss": nll_loss,
    "mse_loss": mse_loss,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "scaled_dot_product_attention": attention,
    "expand": expand,
    "expand_as": lambda x, y: expand(x, *y.shape),
    "broadcast_to": expand,
    "sigmoid": sigmoid,
    "silu": silu,
    "softplus": softplus,
    "gelu": gelu,
    "rsqrt": rsqrt,
    "pow": power,
}
"""Name of a function → its replacement."""
ALIASES = {"axis": "dim", "keepdims": "keepdim"}
"""NumPy's name of an argument → torch's; torch knows both."""
