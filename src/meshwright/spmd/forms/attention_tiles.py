"""Attention of some rows to some keys (a tile), and the merge of tiles into attention to all keys.

A tile returns its result and the logarithm of its softmax denominators, the log-sums. Results of the same rows for
other keys are merged by their log-sums (online softmax, Milakov and Gimelshein, 2018). The gradients of a tile follow
from the merged result and its log-sums, so a tile saves nothing.

A tile is computed by the fused kernel of its device, which never holds the scores. Plain operators compute it if there
is no such kernel, for dropout, and wherever gradients must be differentiable. They hold the scores of one tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..torch_hooks import AttentionKernel, attention_kernel

UNSEEN = float("-inf")
"""The log-sum of a row that has seen no key."""


class Rows(NamedTuple):
    """Some rows in the backward pass: queries, the gradient of the merged result, that result, and its log-sums.

    `total_grad` is the gradient of the log-sums, which only gradients of gradients have.
    """

    query: Tensor
    grad: Tensor
    out: Tensor
    total: Tensor
    total_grad: Tensor | None = None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """Return the rows with each tensor changed."""
        query, grad, out, total = map(change, self[:4])
        return Rows(query, grad, out, total, None if self.total_grad is None else change(self.total_grad))


@dataclass(frozen=True, slots=True)
class Tile:
    """Attention of queries (..., heads, s, d) to keys (..., heads, t, d) with values (..., heads, t, e).

    The dim of the heads may have size one in keys and values, for queries that share them. `mask` is added to the
    scores, or is False where a row does not see a key. With `is_causal`, row i sees the keys up to i. `factors` are
    those by which dropout multiplies the weights.
    """

    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    factors: Tensor | None = None

    def attend(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result and the log-sums (..., s, 1), in at least float32 precision."""
        kernel = self._kernel(query)
        if kernel is None:
            return self._attend_by_operators(query)
        q, k, v = self._operands(query)
        mask = _four_dims_of_mask(self.mask, query)
        out, total = kernel.forward(q, k, v, mask, self.is_causal, self.scale)
        out, total = wide(out.narrow(-1, 0, self.value.shape[-1])), total.unsqueeze(-1)
        if mask is not None:  # kernels disagree on the log-sum of a row that sees no key
            seen = (mask > UNSEEN).any(-1, keepdim=True)
            out, total = torch.where(seen, out, 0), torch.where(seen, total, UNSEEN)
        return out.reshape(*query.shape[:-1], out.shape[-1]), total.reshape(*query.shape[:-1], 1)

    def gradients(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Return the terms of the tile in the gradients of queries, keys and values."""
        kernel = self._kernel(rows.query)
        if kernel is None or rows.total_grad is not None or torch.is_grad_enabled():
            return self._gradients_by_operators(rows)
        q, k, v = self._operands(rows.query)
        grad, out = (_four_dims(_padded(x, v.shape[-1]), q.shape[:2]) for x in (rows.grad, rows.out))
        total = _finite(rows.total).reshape(q.shape[:-1])
        mask = _four_dims_of_mask(self.mask, rows.query)
        found = kernel.backward(grad, q, k, v, out, total, mask, self.is_causal, self.scale)
        heads = rows.query.shape[:-2]
        query, key, value = (_unpadded(x, heads, like) for x, like in zip(found, self._given(rows.query), strict=True))
        return query, key, value

    def _kernel(self, query: Tensor) -> AttentionKernel | None:
        is_empty = 0 in (*query.shape, *self.key.shape, *self.value.shape)
        if is_empty or self.factors is not None:
            return None
        return attention_kernel(query, self.mask, self.value.shape[-1])

    def _given(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query, self.key, self.value

    def _operands(self, query: Tensor) -> list[Tensor]:
        """Return queries, keys and values (batch, heads, length, features); all have as many features.

        Kernels need this, and a multiple of eight on CUDA. Features that are added are zero and change no score.
        """
        features = max(query.shape[-1], self.value.shape[-1])
        features += -features % 8
        heads = query.shape[:-2]
        batch = (prod(heads[:-1]), heads[-1] if heads else 1)
        shared = (x.expand(*heads, *x.shape[-2:]) for x in self._given(query))
        return [_four_dims(_padded(x, features), batch) for x in shared]

    def _scores(self, query: Tensor) -> Tensor:
        scores, mask = wide(query @ self.key.mT) * self.scale, self.mask
        if self.is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is None:
            return scores
        return scores.masked_fill(~mask, UNSEEN) if mask.dtype == torch.bool else scores + mask

    def _dropped(self, weights: Tensor) -> Tensor:
        return weights if self.factors is None else weights * self.factors

    def _attend_by_operators(self, query: Tensor) -> tuple[Tensor, Tensor]:
        scores = self._scores(query)
        total = scores.logsumexp(-1, keepdim=True)
        weights = self._dropped((scores - _finite(total)).exp())
        return wide(weights.to(self.value.dtype) @ self.value), total

    def _gradients_by_operators(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        drift = wide(rows.grad * rows.out).sum(-1, keepdim=True)
        drift = drift if rows.total_grad is None else drift - rows.total_grad
        weights = (self._scores(rows.query) - _finite(rows.total)).exp()
        scores = (weights * (self._dropped(wide(rows.grad @ self.value.mT)) - drift) * self.scale).to(rows.query.dtype)
        grad_key, grad_value = scores.mT @ rows.query, self._dropped(weights).to(rows.grad.dtype).mT @ rows.grad
        return scores @ self.key, grad_key.sum_to_size(self.key.shape), grad_value.sum_to_size(self.value.shape)


@dataclass(slots=True)
class Merged:
    """The merged results of some rows for the keys that the rows have seen so far.

    The weight of a tile is exp(its log-sum - `top`), where `top` (..., s, 1) is the largest log-sum of a tile.
    `weighted` is the sum of results times weights, and `weight` is the sum of weights. If a row has -1e9 in its mask
    for all keys, no digit of a log-sum is left for the number of keys. The division by `weight` at the end then gives
    the mean of the tiles.
    """

    weighted: Tensor
    weight: Tensor
    top: Tensor

    @staticmethod
    def empty(query: Tensor, features: int) -> Merged:
        """Return the result of rows that have seen no key."""
        shape = query.shape[:-1]
        out = wide(query.new_zeros((*shape, features)))
        return Merged(out, out.new_zeros((*shape, 1)), out.new_full((*shape, 1), UNSEEN))

    def merge(self, out: Tensor, total: Tensor) -> None:
        """Add the result for other keys."""
        top = torch.maximum(self.top, total)
        before, added = (self.top - _finite(top)).exp(), (total - _finite(top)).exp()
        self.weighted = self.weighted * before + out * added
        self.weight = self.weight * before + added
        self.top = top

    @property
    def out(self) -> Tensor:
        """The result; zero for rows that have seen no key."""
        return self.weighted / torch.where(self.top == UNSEEN, 1, self.weight)

    @property
    def total(self) -> Tensor:
        """The log-sums (..., s, 1)."""
        return self.top + self.weight.log()


def wide(x: Tensor) -> Tensor:
    """Return `x` in at least float32, for sums of many terms."""
    return x.float() if x.dtype.itemsize < 4 else x


def _finite(x: Tensor) -> Tensor:
    """Return log-sums with zero for rows that have seen no key, so that their weights are zero."""
    return torch.where(x == UNSEEN, 0, x)


def _padded(x: Tensor, features: int) -> Tensor:
    """Return `x` with zeros as further features. Kernels read the features of a row from adjacent memory."""
    if x.shape[-1] < features:
        return F.pad(x, (0, features - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _unpadded(x: Tensor, heads: Sequence[int], like: Tensor) -> Tensor:
    """Return a gradient (batch, heads, length, features) with the shape of its operand."""
    return x.narrow(-1, 0, like.shape[-1]).reshape(*heads, *like.shape[-2:]).sum_to_size(like.shape)


def _four_dims(x: Tensor, heads: Sequence[int]) -> Tensor:
    return x.reshape(*heads, *x.shape[-2:])


def _four_dims_of_mask(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return the mask as terms of the scores (batch or 1, heads or 1, s or 1, t)."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), UNSEEN)
    mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)
    batch = query.shape[:-3] if prod(mask.shape[:-3]) > 1 else mask.shape[:-3]
    return mask.expand(*batch, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
