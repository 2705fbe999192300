"""Context parallelism: attention with queries, keys and values sharded along one sequence; no rank holds all keys.

`ring`      keys and values are sent around the ring of ranks (Liu et al., 2023). At every stop a rank attends to the
            keys it has by fused kernels, and merges the result with earlier ones (see `attention_tiles`). In the
            backward pass keys and values are sent again, with their gradients, so they are not saved.
`ulysses`   the shards are moved from the sequence to the heads by an all-to-all, and back (Jacobs et al., 2023).

With causal attention, the rows of a rank are two chunks of the sequence (see `zigzag`). At the first stop, a rank
attends to its own keys, which is one causal tile. At every other stop, it computes two whole tiles of the four that its
two chunks form with the two chunks of the sending rank. Its later rows always see the earlier keys. In addition, its
earlier rows see the earlier keys if the sending rank is before it; otherwise its later rows see the later keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.layout import TorchValue

from ..notation.local_call import LocalCall
from .attention_tiles import UNSEEN, Merged, Rows, Tile
from .block_tiles import BlockTile, Drops, Seen
from .layers import scale_of
from .zigzag import RingCall, ring_index, zagzig, zigzag


class Numbers(NamedTuple):
    """The numbers of rows and keys, and what follows from them, as `Seen` takes them for the first stop.

    With `is_padding`, they are 1, or 0 for rows and keys that were added to make chunks of equal size.
    """

    rows: Tensor
    keys: Tensor
    offset: int | None
    drops: Drops | None = None
    is_padding: bool = False

    def moved(self, move: Callable[[Tensor], Tensor]) -> Numbers:
        """Return the numbers of rows and keys that other ranks had."""
        return self._replace(rows=move(self.rows), keys=move(self.keys))


Which = int | Tensor | None
"""One of two chunks: its number, or a bool tensor that depends on the rank (True: the first chunk); None: both."""


def fits_ring(call: LocalCall, is_causal: bool) -> bool:
    """True if all ranks have equally many rows, and with causal attention two chunks of equal size."""
    return call.total(0, -2) % (call.ranks(0, -2) * (2 if is_causal else 1)) == 0


def fits_padded_ring(call: LocalCall, is_causal: bool, has_mask: bool) -> bool:
    """True unless a mask would need padding: other calls are padded to chunks of equal size."""
    return not has_mask or fits_ring(call, is_causal)


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
    if fits_ring(call, is_causal):
        return attend_in_rounds(call, query, key, value, attn_mask, None, is_causal, scale, enable_gqa)
    padded, rows = partial(_padded, rows=_rows_with_padding(call, s, is_causal)), query.shape[s]
    held = padded(torch.ones(rows, 1, device=query.device))
    numbers = Numbers(held, held, None, is_padding=True)
    out = attend_in_rounds(call, padded(query), padded(key), padded(value), None, numbers, is_causal, scale, enable_gqa)
    return out.narrow(s, 0, rows)


def _rows_with_padding(call: LocalCall, s: int, is_causal: bool) -> int:
    """Return the number of rows of the largest part, or the next even number."""
    rows = -(-call.total(0, s) // call.ranks(0, s))
    return rows + rows % 2 if is_causal else rows


def _padded(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, rows - x.shape[-2]))


def attend_in_rounds(
    call: RingCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    numbers: Numbers | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Return the attention of the local rows to the keys of all ranks along the sequence."""
    s = query.dim() - 2
    query, pair = query.view_as(query), torch.cat((key, value), -1)  # the function below saves no DistTensor
    is_moved = is_causal and call.ranks(0, s) > 1
    if is_moved:
        query, pair = zigzag(call, query, s), zigzag(call, pair, s)
        numbers = None if numbers is None else numbers.moved(partial(zigzag, call, s=s))
    heads = query.shape[:-2]
    mask = None if mask is None else mask.detach()
    if enable_gqa:
        query, pair, mask = _by_shared_key(query, pair, mask)
    tour = _RingRound(call, s, key.shape[-1], is_causal, scale_of(query, scale), numbers)
    out, _ = _ring(tour, query, pair, mask)
    out = out.reshape(*heads, *out.shape[-2:])
    return zagzig(call, out, s) if is_moved else out


def _by_shared_key(query: Tensor, pair: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return query, pair and mask with the heads split into key heads and query heads per key head.

    The second dim has size one in keys and values.
    """
    shared = pair.shape[-3]
    per_head = mask is not None and mask.dim() > 2 and mask.shape[-3] != 1
    if mask is not None:
        mask = mask.unflatten(-3, (shared, -1)) if per_head else mask.unsqueeze(-3)
    return query.unflatten(-3, (shared, -1)), pair.unsqueeze(-3), mask


@dataclass(frozen=True, slots=True)
class _RingRound:
    """One round of keys and values on the ring: sequence dim `s`, number of `features` of a key, causality and scale.

    Keys and values are sent in one concatenated tensor, the pair. The tensors of `numbers` are arguments of their own.
    """

    call: RingCall
    s: int
    features: int
    is_causal: bool
    scale: float
    numbers: Numbers | None

    @property
    def is_padded(self) -> bool:
        return self.numbers is not None and self.numbers.is_padding

    @property
    def stops(self) -> range:
        return range(self.call.ranks(0, self.s))

    def onward(self, x: Tensor) -> Tensor:
        """Return the `x` of the next rank on the ring."""
        p = len(self.stops)
        return x if p == 1 else self.call.permute(x, 0, self.s, [(i + 1) % p for i in range(p)])

    def chunk_pairs(self, stop: int, place: Tensor) -> list[tuple[Which, Which]]:
        """Return the tiles at this stop: a chunk of rows, and a chunk of keys."""
        if self.is_causal and stop == 0 and self.is_padded:
            return [(0, 0), (1, 0), (1, 1)]
        if stop == 0 or not self.is_causal:
            return [(None, None)]
        is_before = place + stop >= len(self.stops)
        return [(1, 0), (is_before, is_before)]

    def tile(
        self, stop: int, here: _Keys, of: Which, mask: Tensor | None, of_rows: Tensor | None, at: Which
    ) -> Tile | BlockTile:
        """Return the attention of a chunk of rows to a chunk of the keys of this stop."""
        key, value = self.split(_pick(here.pair, of))
        is_causal = self.is_causal and stop == 0
        if self.numbers is None or of_rows is None or here.numbers is None:
            return Tile(key, value, mask, is_causal, self.scale)
        if self.numbers.is_padding:
            is_diagonal = is_causal and (at, of) != (1, 0)  # all rows that are kept come before the padding there
            held = _pick(here.numbers, of).mT > 0
            return Tile(key, value, None if is_diagonal else held, is_diagonal, self.scale)
        offset = self.numbers.offset if is_causal else None
        rows, keys = _pick(of_rows, at), _pick(here.numbers, of)
        return BlockTile(key, value, Seen(rows, keys, offset, mask, self.numbers.drops), self.scale)

    def columns(self, mask: Tensor | None, stop: int, place: Tensor) -> Tensor | None:
        """Return the columns of a mask for the keys of this stop."""
        if mask is None:
            return None
        p = len(self.stops)
        n = mask.shape[-1] // p
        return mask.index_select(-1, torch.arange(n, device=mask.device) + (place + stop) % p * n)

    def split(self, pair: Tensor) -> tuple[Tensor, Tensor]:
        return pair.narrow(-1, 0, self.features), pair.narrow(-1, self.features, pair.shape[-1] - self.features)


class _Keys(NamedTuple):
    """Keys and values that travel on the ring, and the numbers of the keys, if any."""

    pair: Tensor
    numbers: Tensor | None

    def onward(self, tour: _RingRound) -> _Keys:
        return _Keys(tour.onward(self.pair), None if self.numbers is None else tour.onward(self.numbers))


class _Ring(torch.autograd.Function):
    """Ring attention; returns the result and the log of the softmax denominators.

    If the backward pass is to be differentiated again, it consists of differentiable operators on these and the inputs.
    """

    generate_vmap_rule = True
    """torch.func needs this, and a `setup_context`, for the attention of one device."""

    @staticmethod
    def forward(
        tour: _RingRound,
        query: Tensor,
        pair: Tensor,
        mask: Tensor | None,
        of_rows: Tensor | None,
        of_keys: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        place = ring_index(tour.call, query, tour.s)
        found = Merged.empty(query, pair.shape[-1] - tour.features)
        here = _Keys(pair, of_keys)
        for stop in tour.stops:
            here = here.onward(tour) if stop else here
            columns = tour.columns(mask, stop, place)
            for at, of in tour.chunk_pairs(stop, place):
                out, total = tour.tile(stop, here, of, columns, of_rows, at).attend(_pick(query, at))
                found.merge(_spread(out, at, 0), _spread(total, at, UNSEEN))
        return found.out.to(query.dtype), found.total

    @staticmethod
    def setup_context(ctx: TorchValue, inputs: tuple[TorchValue, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.tour = inputs[0]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[1:], *output)

    @staticmethod
    def backward(ctx: TorchValue, *grads: TorchValue) -> TorchValue:
        tour: _RingRound = ctx.tour
        query, pair, mask, of_rows, of_keys, out, total = ctx.saved_tensors
        grad = grads[0] if grads[0] is not None else torch.zeros_like(out)
        place = ring_index(tour.call, query, tour.s)
        rows = Rows(query, grad, out, total, grads[1])
        grad_query, grad_pair = torch.zeros_like(query), torch.zeros_like(pair)
        here = _Keys(pair, of_keys)
        for stop in tour.stops:
            if stop:
                here, grad_pair = here.onward(tour), tour.onward(grad_pair)
            columns = tour.columns(mask, stop, place)
            for at, of in tour.chunk_pairs(stop, place):
                tile, asked = tour.tile(stop, here, of, columns, of_rows, at), rows.mapped(partial(_pick, which=at))
                of_query, *of_pair = tile.gradients(asked)
                grad_query = grad_query + _spread(of_query, at, 0)
                grad_pair = grad_pair + _spread(torch.cat(of_pair, -1), of, 0)
        return None, grad_query, tour.onward(grad_pair), None, None, None


def _ring(tour: _RingRound, query: Tensor, pair: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    of_rows, of_keys = (None, None) if tour.numbers is None else (tour.numbers.rows, tour.numbers.keys)
    found: TorchValue = _Ring.apply(tour, query, pair, mask, of_rows, of_keys)
    return found


def _pick(x: Tensor, which: Which) -> Tensor:
    """Return one of the two chunks of a sequence, or the whole sequence."""
    if which is None:
        return x
    first, last = x.chunk(2, -2)
    return (first, last)[which] if isinstance(which, int) else torch.where(which, first, last)


def _spread(x: Tensor, which: Which, fill: float) -> Tensor:
    """Return the sequence that has `x` as one of its two chunks, and `fill` as the other."""
    if which is None:
        return x
    if isinstance(which, int):
        other = torch.full_like(x, fill)
        return torch.cat((x, other) if which == 0 else (other, x), -2)
    return torch.cat((torch.where(which, x, fill), torch.where(which, fill, x)), -2)
