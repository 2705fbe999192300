"""Local forms of losses over classes: cross entropy and negative log likelihood.

If classes are sharded, cross entropy makes one exchange. For each target, a rank sends the largest of its logits, the
sum of exponentials relative to it, and its share of the sums that the loss needs, such as the logit of the target.
Every rank merges the shares as log-sum-exp merges parts, and computes the whole loss. So the loss is invariant, and the
backward pass makes no exchange.

Shapes: r ranks along the classes, k shares, t targets (all dims of the logits but the classes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..notation.local_call import LocalCall
from .indexing import check_bounds
from .reductions import at_least_float32, max_or_lowest, sum_over

SUM = 2
_LOWEST = float("-inf")


def cross_entropy(
    call: LocalCall,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the loss if classes are sharded; otherwise this rank's term of it."""
    c = min(x.dim() - 1, 1)
    if call.ranks(0, c) == 1:
        terms = partial(F.cross_entropy, x, target, weight, ignore_index=ignore_index, label_smoothing=label_smoothing)
        return _of_whole_classes(call, terms, x, target, weight, reduction, ignore_index)
    logits = _Logits.of(call, at_least_float32(x), c)
    weight = None if weight is None else at_least_float32(weight)
    if target.dtype.is_floating_point:
        loss = _loss_of_probabilities(logits, at_least_float32(target), weight, label_smoothing)
        count = _targets(call, x, c) if reduction == 1 else 1
        return (loss if reduction == 0 else loss.sum() / count).to(x.dtype)
    loss, mass = _loss_of_indices(logits, target, weight, ignore_index, label_smoothing)
    rows = tuple(d for d in range(x.dim()) if d != c)
    return _reduced(call, loss, mass, reduction, rows).to(x.dtype)


def nll_loss(
    call: LocalCall,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> Tensor:
    """Return this rank's term of the loss: the targets whose classes it holds."""
    c = min(x.dim() - 1, 1)
    if call.ranks(0, c) == 1:
        terms = partial(F.nll_loss, x, target, weight, ignore_index=ignore_index)
        return _of_whole_classes(call, terms, x, target, weight, reduction, ignore_index)
    counts = target != ignore_index
    place = _Place.of(call, target, counts, x.shape[c], c)
    if weight is None:
        rows = tuple(d for d in range(x.dim()) if d != c)
        return _reduced(call, -place.pick(x), counts, reduction, rows).to(x.dtype)
    mass = place.pick_weight(weight)
    return _reduced(call, -place.pick(x) * mass, mass, reduction, tuple(range(x.dim()))).to(x.dtype)


class _Place(NamedTuple):
    """The classes of the targets: the index in this rank's shard of dim `c`, and whether this rank holds the class."""

    local: Tensor
    mine: Tensor
    c: int

    @staticmethod
    def of(call: LocalCall, target: Tensor, counts: Tensor, size: int, c: int) -> _Place:
        """Return the places of the targets that count, for a shard of `size` classes."""
        check_bounds(torch.where(counts, target, 0), max(call.total(0, c), 1), c)
        local = target - call.start(0, c)
        mine = (local >= 0) & (local < size) & counts
        return _Place(torch.where(mine, local, 0), mine, c)

    def pick(self, x: Tensor) -> Tensor:
        """Return `x` at the class of each target; zero if another rank holds the class."""
        if x.shape[self.c] == 0:
            return x.sum(self.c)
        return torch.where(self.mine, x.gather(self.c, self.local.unsqueeze(self.c)).squeeze(self.c), 0)

    def pick_weight(self, weight: Tensor) -> Tensor:
        """Return the weight of the class of each target, without a gradient; zero if another rank holds the class."""
        if weight.shape[0] == 0:
            return weight.new_zeros(self.mine.shape)
        return torch.where(self.mine, weight.detach()[self.local], 0)


@dataclass(frozen=True, slots=True)
class _Logits:
    """This rank's logits; `top` is the largest of each target, and `base` is `top`, or zero if that is -inf."""

    call: LocalCall
    x: Tensor
    c: int
    top: Tensor
    base: Tensor

    @staticmethod
    def of(call: LocalCall, x: Tensor, c: int) -> _Logits:
        top = max_or_lowest(x.detach(), (c,)).squeeze(c)
        return _Logits(call, x, c, top, _finite(top))

    def weighted(self, weights: Tensor) -> list[Tensor]:
        """Return two shares: the weighted sum of the logits above `base`, and the sum of the weights."""
        above = self.x - self.base.unsqueeze(self.c)
        return [(above * weights).sum(self.c), weights.expand_as(above).sum(self.c)]

    def merge(self, shares: Sequence[Tensor]) -> _Merged:
        """Exchange the shares of this rank, together with what log-sum-exp needs."""
        total = (self.x - self.base.unsqueeze(self.c)).exp().sum(self.c)
        every = self.call.gather_invariant(torch.stack([self.top, total, *shares]), 0, self.c)
        tops = every[:, 0].detach()
        top = tops.amax(0)
        return _Merged(tops, top, (every[:, 1] * (tops - top).exp()).sum(0).log(), every[:, 2:])


@dataclass(frozen=True, slots=True)
class _Merged:
    """The shares of all ranks, r k t, and for each target the log of the sum of exponentials relative to `top`."""

    tops: Tensor
    top: Tensor
    log_total: Tensor
    shares: Tensor

    def at(self, k: int) -> Tensor:
        """Return the sum of a share over all ranks."""
        return self.shares[:, k].sum(0)

    def loss_of_weighted(self, k: int) -> Tensor:
        """Return the weighted sum of the negative log-probabilities, whose shares `weighted` made, at `k` and after."""
        mass = self.shares[:, k + 1]
        above = self.shares[:, k] + mass * (_finite(self.tops) - self.top)
        return self.log_total * mass.sum(0) - above.sum(0)


def _finite(top: Tensor) -> Tensor:
    return torch.where(top == _LOWEST, 0, top)


def _loss_of_indices(
    logits: _Logits, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of each target, zero if it is ignored, and its weight in a mean."""
    call, x, c = logits.call, logits.x, logits.c
    counts = target != ignore_index
    place = _Place.of(call, target, counts, x.shape[c], c)
    weights = [] if weight is None else [place.pick_weight(weight)]
    smooth = logits.weighted(_per_class(weight, x, c)) if label_smoothing else []
    merged = logits.merge([place.pick(x), *weights, *smooth])
    loss = merged.log_total - (merged.at(0) - merged.top)
    mass = counts
    if weight is not None:
        mass = merged.at(1)
        loss = loss * mass
    if label_smoothing:
        spread = merged.loss_of_weighted(1 + len(weights)) / max(call.total(0, c), 1)
        loss = loss * (1 - label_smoothing) + spread * label_smoothing
    return torch.where(counts, loss, 0), mass


def _loss_of_probabilities(logits: _Logits, target: Tensor, weight: Tensor | None, label_smoothing: float) -> Tensor:
    """Return the loss of each target, which is a probability for each class."""
    x, c = logits.x, logits.c
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / max(logits.call.total(0, c), 1)
    return logits.merge(logits.weighted(target * _per_class(weight, x, c))).loss_of_weighted(0)


def _of_whole_classes(
    call: LocalCall,
    terms: Callable[..., Tensor],
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
) -> Tensor:
    """Return this rank's term of the loss if all classes are local; `terms(reduction=...)` is torch's loss.

    The mean is over the targets of all ranks.
    """
    if reduction == 0:
        return terms(reduction="none")
    if reduction == SUM:
        return terms(reduction="sum")
    c = min(x.dim() - 1, 1)
    if target.dtype.is_floating_point:
        return terms(reduction="sum") / _targets(call, x, c)
    counts = target != ignore_index
    mass = counts if weight is None else torch.where(counts, weight[torch.where(counts, target, 0)], 0)
    return terms(reduction="sum") / sum_over(call, mass.sum(dtype=x.dtype), 0, tuple(range(x.dim())))


def _targets(call: LocalCall, x: Tensor, c: int) -> int:
    """Return the number of targets of all ranks, by which torch divides; 0 without classes (dim `c`)."""
    sizes = [call.total(0, d) for d in range(x.dim())]
    return prod(sizes) // sizes[c] if sizes[c] else 0


def _per_class(weight: Tensor | None, x: Tensor, c: int) -> Tensor:
    """Return the weights of this rank's classes in the dims of the logits; ones without `weight`."""
    shape = [-1 if d == c else 1 for d in range(x.dim())]
    return (x.new_ones(x.shape[c]) if weight is None else weight).reshape(shape)


def _reduced(call: LocalCall, loss: Tensor, mass: Tensor, reduction: int, dims: tuple[int, ...]) -> Tensor:
    """Return the reduced loss. A mean is over the weights of all targets, summed over the ranks along `dims`."""
    if reduction == 0:
        return loss
    if reduction == SUM:
        return loss.sum()
    total = mass.sum(dtype=torch.float32 if mass.dtype.itemsize < 4 else None)
    return loss.sum() / sum_over(call, total, 0, dims)
