"""Local forms of convolutions and normalizations: groups, rows of neighbours, sums over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.layout import TorchValue

from ..notation.local_call import LocalCall
from ..notation.rule import LocalForm
from .empty_tensors import trim_to_shape, zeros_for_empty
from .reductions import at_least_float32, scale_and_shift, sum_over

Pad = tuple[int, int]
"""Padding rows before and after a dim."""


def convolution(run: Callable[..., Tensor], batch: int, pads: Sequence[Pad], per_group: int) -> LocalForm:
    """Return a form that calls `run(x, weight, bias, padding, groups)` on a shard.

    `pads` are the padding rows of each spatial dim; along a sharded dim they are rows of neighbours. `batch` is the
    number of batch dims, `per_group` the number of input channels per group (0: one group).
    """

    def form(
        call: LocalCall, x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: TorchValue, **kw: TorchValue
    ) -> Tensor:
        left = list(pads)
        for s, pad in enumerate(pads):
            at = batch + 1 + s
            if call.ranks(0, at) > 1:
                rows = call.halo(x, 0, at, *pad)
                x = rows if x.shape[at] else _with_one_more(rows, at)
                left[s] = (0, 0)
        groups = max(x.shape[batch] // per_group, 1) if per_group else 1
        least = max(groups * per_group, 1)
        x, weight = zeros_for_empty(x, least), zeros_for_empty(weight, least)
        if bias is None or bias.numel():
            return trim_to_shape(run(x, weight, bias, left, groups), call.out_shape(0))
        return trim_to_shape(run(x, weight, None, left, groups) + bias.sum(), call.out_shape(0))

    return form


def _with_one_more(x: Tensor, at: int) -> Tensor:
    """Return `x` with one more row, for a rank without rows, since torch refuses to compute an empty result."""
    return F.pad(x, [0, 0] * (x.dim() - 1 - at) + [0, 1])


def group_norm(channels: int) -> LocalForm:
    """Return a form for groups of `channels` channels; any dim after the channels may be sharded."""

    def form(
        call: LocalCall,
        x: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        cudnn_enabled: bool = True,
    ) -> Tensor:
        behind = tuple(range(2, x.dim()))
        count = channels * prod(call.total(0, d) for d in behind)
        groups = x.shape[1] // channels if channels else num_groups
        if count == 0:  # torch computes the gradient of the weight
            return torch.group_norm(x, groups, weight, bias, eps)
        y = at_least_float32(x).unflatten(1, (groups, channels))
        own = tuple(range(2, y.dim()))
        y = y - sum_over(call, y.sum(own, keepdim=True), 0, behind) / count
        variance = sum_over(call, y.square().sum(own, keepdim=True), 0, behind) / count
        y = (y * (variance + eps).rsqrt()).flatten(1, 2)
        return scale_and_shift(y, _per_channel(weight, x), _per_channel(bias, x)).to(x.dtype)

    return form


def _per_channel(v: Tensor | None, x: Tensor) -> Tensor | None:
    return None if v is None else v.reshape([-1 if d == 1 else 1 for d in range(x.dim())])


def batch_norm(
    call: LocalCall,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Normalize by mean and variance over the samples of all ranks; running statistics are updated equally on all."""
    dims = tuple(d for d in range(x.dim()) if d != 1)
    count = prod(call.total(0, d) for d in dims)
    y = at_least_float32(x)
    mean = sum_over(call, y.sum(dims, keepdim=True), 0, dims) / count
    y = y - mean
    variance = sum_over(call, y.square().sum(dims, keepdim=True), 0, dims) / count
    with torch.no_grad():
        _track(call, running_mean, mean.detach(), momentum)
        _track(call, running_var, variance.detach() * (count / max(count - 1, 1)), momentum)
    return scale_and_shift(y * (variance + eps).rsqrt(), _per_channel(weight, x), _per_channel(bias, x)).to(x.dtype)


def _track(call: LocalCall, running: Tensor | None, value: Tensor, momentum: float) -> None:
    """Update a running statistic, which every rank holds whole, also if the channels are sharded."""
    if running is None:
        return
    new = value.reshape(-1).to(running.dtype)
    if running.shape != new.shape:
        places = torch.arange(new.shape[0], device=new.device) + call.start(0, 1)
        new = call.sum(torch.zeros_like(running).index_copy(0, places, new), 0, 1)
    running.mul_(1 - momentum).add_(new * momentum)
