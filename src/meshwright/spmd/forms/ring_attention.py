"""Context parallelism: attention with queries, keys and values sharded along one sequence; no rank holds all keys.

`ring`      keys and values are sent around the ring of ranks (Liu et al., 2023). At every stop a rank attends to the
            keys it has, and merges the result with earlier ones by the log of their sums (online softmax). In the
            backward pass keys and values are sent again, with their gradients, so they are not saved.
`ulysses`   the shards are moved from the sequence to the heads by an all-to-all, and back (Jacobs et al., 2023).

With causal attention, rows of later ranks would have more work. So the sequence is split into two chunks per rank, and
during the call rank i of p has the chunks i and 2p - 1 - i (zigzag). At every stop except the first, a rank then
computes two whole tiles of the four that its two chunks form with the two chunks of the sending rank. Its later rows
always see the earlier keys. In addition, its earlier rows see the earlier keys if the sending rank is before it;
otherwise its later rows see the later keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.layout import TorchValue

from ..notation.local_call import LocalCall
from .layers import scale_of

Which = int | Tensor
"""One of two chunks: its number, or a bool tensor that depends on the rank (True: the first chunk)."""


def fits_ring(call: LocalCall, is_causal: bool) -> bool:
    """True if all ranks have equally many rows, and with causal attention two chunks of equal size."""
    return call.total(0, -2) % (call.ranks(0, -2) * (2 if is_causal else 1)) == 0


def fits_ulysses(call: LocalCall, has_heads: bool) -> bool:
    """True if the heads of queries and keys can also be sharded over the axes that shard the sequence."""
    if not has_heads or call.ranks(0, -3) != call.ranks(1, -3):
        return False
    pieces = call.ranks(0, -3) * call.ranks(0, -2)
    return call.total(0, -3) % pieces == 0 and call.total(1, -3) % pieces == 0


def ulysses(
    call: LocalCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention of the local heads over the whole sequence."""
    s = query.dim() - 2
    query, key, value = (call.recut(x, at, s, s - 1) for at, x in enumerate((query, key, value)))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return call.recut_result(out, 0, s, s - 1)


def ring(
    call: LocalCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention of the local rows with all keys, one shard of keys at a time."""
    s = query.dim() - 2
    if attn_mask is not None and attn_mask.requires_grad:
        key, value = (torch.cat(call.gather(x, 1, s).unbind(), s) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask, scale=scale, enable_gqa=enable_gqa)
    query = query * scale_of(query, scale)
    pair = torch.cat((key, value), -1)
    if is_causal:
        query, pair = _zigzag(call, query, s), _zigzag(call, pair, s)
    heads = query.shape[:-2]
    attn_mask = None if attn_mask is None else attn_mask.detach()
    if enable_gqa:
        query, pair, attn_mask = _by_shared_key(query, pair, attn_mask)
    tour = _RingRound(call, s, key.shape[-1], is_causal)
    out, _ = _ring(tour, query, pair, attn_mask)
    out = out.reshape(*heads, *out.shape[-2:])
    return _zagzig(call, out, s) if is_causal else out


def _by_shared_key(query: Tensor, pair: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return query, pair and mask with the heads split into key heads and query heads per key head.

    The second dim has size one in keys and values.
    """
    shared = pair.shape[-3]
    per_head = mask is not None and mask.dim() > 2 and mask.shape[-3] != 1
    if mask is not None:
        mask = mask.unflatten(-3, (shared, -1)) if per_head else mask.unsqueeze(-3)
    return query.unflatten(-3, (shared, -1)), pair.unsqueeze(-3), mask


def _zigzag(call: LocalCall, x: Tensor, s: int) -> Tensor:
    """Return the chunks i and 2p - 1 - i on rank i, for its chunks 2i and 2i + 1."""
    halves = zip(x.chunk(2, s), _chunk_sources(call, s), strict=True)
    even, odd = (call.permute(half, 0, s, sources) for half, sources in halves)
    is_even = _ring_index(call, x, s) % 2 == 0
    return torch.cat((torch.where(is_even, even, odd), torch.where(is_even, odd, even)), s)


def _zagzig(call: LocalCall, x: Tensor, s: int) -> Tensor:
    """Return the chunks 2i and 2i + 1 on rank i, for its chunks i and 2p - 1 - i."""
    first, last = x.chunk(2, s)
    is_even = _ring_index(call, x, s) % 2 == 0
    halves = torch.where(is_even, first, last), torch.where(is_even, last, first)
    targets = map(_inverse, _chunk_sources(call, s))
    return torch.cat([call.permute(half, 0, s, to) for half, to in zip(halves, targets, strict=True)], s)


def _chunk_sources(call: LocalCall, s: int) -> tuple[list[int], list[int]]:
    """Return, for each rank, the source rank of its even chunk, and the source rank of its odd chunk."""
    last = 2 * call.ranks(0, s) - 1
    evens = [last - i if i % 2 else i for i in range(call.ranks(0, s))]
    return [even // 2 for even in evens], [(last - even) // 2 for even in evens]


def _inverse(sources: Sequence[int]) -> list[int]:
    return sorted(range(len(sources)), key=sources.__getitem__)


def _ring_index(call: LocalCall, like: Tensor, s: int) -> Tensor:
    """Return this rank's index on the ring, as a tensor, since it differs between ranks."""
    return torch.arange(1, device=like.device) + call.index(0, s)


@dataclass(frozen=True, slots=True)
class _RingRound:
    """One round of keys and values on the ring: sequence dim `s`, number of `features` of a key, and causality.

    Queries are already scaled. Keys and values are sent in one concatenated tensor, the pair.
    """

    call: LocalCall
    s: int
    features: int
    is_causal: bool

    @property
    def stops(self) -> range:
        return range(self.call.ranks(0, self.s))

    def onward(self, x: Tensor) -> Tensor:
        """Return the `x` of the next rank on the ring."""
        p = len(self.stops)
        return self.call.permute(x, 0, self.s, [(i + 1) % p for i in range(p)])

    def chunks(self, x: Tensor) -> list[Tensor]:
        return list(x.chunk(2, -2)) if self.is_causal else [x]

    def tiles(self, stop: int, place: Tensor) -> list[tuple[Which, Which, bool]]:
        """Return the tiles at this stop: chunk of rows, chunk of keys, and True if the tile is causal."""
        if not self.is_causal:
            return [(0, 0, False)]
        if stop == 0:
            return [(0, 0, True), (1, 0, False), (1, 1, True)]
        is_before = place + stop >= len(self.stops)
        return [(1, 0, False), (is_before, is_before, False)]

    def columns(self, mask: Tensor | None, stop: int, place: Tensor) -> Tensor | None:
        """Return the columns of a mask for the keys of this stop."""
        if mask is None:
            return None
        p = len(self.stops)
        n = mask.shape[-1] // p
        return mask.index_select(-1, torch.arange(n, device=mask.device) + (place + stop) % p * n)

    def scores(self, query: Tensor, key: Tensor, mask: Tensor | None, diagonal: bool) -> Tensor:
        scores = _wide(query @ key.mT)
        if diagonal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is None:
            return scores
        return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask


class _Ring(torch.autograd.Function):
    """Ring attention; returns the result and the log of the softmax denominators.

    The backward pass consists of differentiable operators on these and the inputs, so it can be differentiated again.
    """

    @staticmethod
    def forward(
        ctx: TorchValue, tour: _RingRound, query: Tensor, pair: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.tour = tour
        place = _ring_index(tour.call, query, tour.s)
        rows = tour.chunks(query)
        sums = [_wide(x.new_full((*x.shape[:-1], 1), float("-inf"))) for x in rows]
        outs = [_wide(x.new_zeros((*x.shape[:-1], pair.shape[-1] - tour.features))) for x in rows]
        here = pair
        for stop in tour.stops:
            here = tour.onward(here) if stop else here
            columns, keys = tour.columns(mask, stop, place), tour.chunks(here)
            for at, of, diagonal in tour.tiles(stop, place):
                key, value = _split(_pick(keys, of), tour.features)
                scores = tour.scores(_pick(rows, at), key, columns, diagonal)
                _join(outs, sums, at, value, scores)
        out, total = torch.cat(outs, -2).to(query.dtype), torch.cat(sums, -2)
        ctx.save_for_backward(query, pair, mask, out, total)
        return out, total

    @staticmethod
    def backward(ctx: TorchValue, *grads: TorchValue) -> TorchValue:
        tour: _RingRound = ctx.tour
        query, pair, mask, out, total = ctx.saved_tensors
        grad, grad_total = grads
        place = _ring_index(tour.call, query, tour.s)
        drift = _wide(grad * out).sum(-1, keepdim=True) - grad_total
        asked = [tour.chunks(x) for x in (query, grad, total, drift)]
        grad_query = [torch.zeros_like(x) for x in asked[0]]
        grad_pair = torch.zeros_like(pair)
        for stop in tour.stops:
            if stop:
                pair, grad_pair = tour.onward(pair), tour.onward(grad_pair)
            columns, keys, grad_keys = tour.columns(mask, stop, place), tour.chunks(pair), tour.chunks(grad_pair)
            for at, of, diagonal in tour.tiles(stop, place):
                found = _gradients(tour, [_pick(x, at) for x in asked], _pick(keys, of), columns, diagonal)
                _add(grad_query, at, found[0])
                _add(grad_keys, of, found[1])
            grad_pair = torch.cat(grad_keys, -2)
        return None, torch.cat(grad_query, -2), tour.onward(grad_pair), None


def _ring(tour: _RingRound, query: Tensor, pair: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    found: TorchValue = _Ring.apply(tour, query, pair, mask)
    return found


def _join(outs: list[Tensor], sums: list[Tensor], at: Which, value: Tensor, scores: Tensor) -> None:
    """Merge the attention of some rows to these keys into their earlier results `outs` and `sums`."""
    total = scores.logsumexp(-1, keepdim=True)
    out = _wide((scores - _finite(total)).exp().to(value.dtype) @ value)
    for n in range(len(sums)):
        if isinstance(at, int) and at != n:
            continue
        new = total if isinstance(at, int) else torch.where(at if n == 0 else ~at, total, float("-inf"))
        both = torch.logaddexp(sums[n], new)
        shift = _finite(both)
        outs[n] = outs[n] * (sums[n] - shift).exp() + out * (new - shift).exp()
        sums[n] = both


def _gradients(
    tour: _RingRound, asked: Sequence[Tensor], pair: Tensor, mask: Tensor | None, diagonal: bool
) -> tuple[Tensor, Tensor]:
    """Return the terms of a tile in the gradients of its queries, and of its keys and values."""
    query, grad, total, drift = asked
    key, value = _split(pair, tour.features)
    weights = (tour.scores(query, key, mask, diagonal) - _finite(total)).exp()
    scores = (weights * (_wide(grad @ value.mT) - drift)).to(query.dtype)
    back = torch.cat((scores.mT @ query, weights.to(grad.dtype).mT @ grad), -1)
    return scores @ key, back.sum_to_size(pair.shape)


def _pick(chunks: Sequence[Tensor], which: Which) -> Tensor:
    return chunks[which] if isinstance(which, int) else torch.where(which, chunks[0], chunks[1])


def _add(totals: list[Tensor], which: Which, x: Tensor) -> None:
    """Add `x` to one of the chunks."""
    if isinstance(which, int):
        totals[which] = totals[which] + x
        return
    totals[0], totals[1] = totals[0] + torch.where(which, x, 0), totals[1] + torch.where(which, 0, x)


def _split(pair: Tensor, features: int) -> tuple[Tensor, Tensor]:
    return pair[..., :features], pair[..., features:]


def _wide(x: Tensor) -> Tensor:
    """Return `x` in at least float32, for sums of many terms."""
    return x.float() if x.dtype.itemsize < 4 else x


def _finite(x: Tensor) -> Tensor:
    """Return `x` with zero for rows that have seen no key yet, so that their weights are zero."""
    return torch.where(x == float("-inf"), 0, x)
