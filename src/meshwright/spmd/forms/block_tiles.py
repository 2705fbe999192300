"""Tiles that are computed in blocks of rows, since they need a mask or dropout that no tile may hold at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention_tiles import Rows, Tile, wide

ROWS_AT_ONCE = 512
"""The number of rows whose mask is held at once."""

Drops = Callable[[Tensor, Tensor], Tensor]
"""Function from the places of rows (s, 1) and of keys (t, 1) to factors (batch, heads, s, t) of their weights."""


class Seen(NamedTuple):
    """The keys that rows see, and the factors of their weights.

    `rows` and `keys` are numbers of documents, (batch, s, 1) and (batch, t, 1), and a row sees the keys of its own
    document. If `drops` is given, they are places in the sequence, (s, 1) and (t, 1), and `mask` is the mask. With an
    `offset`, row i sees no key after key i + offset either.
    """

    rows: Tensor
    keys: Tensor
    offset: int | None = None
    mask: Tensor | None = None
    drops: Drops | None = None

    def block(self, start: int, rows: int, keys: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the mask (..., rows, keys) of some rows from `start` on and of the first keys, and the factors."""
        of_rows, of_keys = _rows(self.rows, start, rows), _rows(self.keys, 0, keys)
        if self.drops is None:
            return self._causal(of_rows == of_keys.mT, start, rows, keys), None
        mask = self.mask if self.mask is None or self.mask.shape[-2] == 1 else _rows(self.mask, start, rows)
        return self._causal(mask, start, rows, keys), self.drops(of_rows, of_keys)

    def _causal(self, seen: Tensor | None, start: int, rows: int, keys: int) -> Tensor | None:
        if self.offset is None:
            return seen
        place = torch.arange(rows, device=self.rows.device) + (start + self.offset)
        earlier = place.unsqueeze(-1) >= torch.arange(keys, device=self.rows.device)
        return earlier if seen is None else seen & earlier


@dataclass(frozen=True, slots=True)
class BlockTile:
    """A tile whose mask and factors are those of `seen`. Only those of one block of rows are held at once."""

    key: Tensor
    value: Tensor
    seen: Seen
    scale: float

    def attend(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result and the log-sums of all rows, as `Tile.attend`."""
        found = [self._tile(query, start, rows).attend(_rows(query, start, rows)) for start, rows in _blocks(query)]
        outs, totals = zip(*found, strict=True)
        return torch.cat(outs, -2), torch.cat(totals, -2)

    def gradients(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Return the terms of the tile in the gradients of queries, keys and values, as `Tile.gradients`."""
        of_rows: list[Tensor] = []
        of_key, of_value = (wide(torch.zeros_like(x)) for x in (self.key, self.value))
        for start, count in _blocks(rows.query):
            tile = self._tile(rows.query, start, count)
            query, key, value = tile.gradients(rows.mapped(partial(_rows, start=start, rows=count)))
            of_rows.append(query)
            of_key, of_value = _add(of_key, key), _add(of_value, value)
        return torch.cat(of_rows, -2), of_key.to(self.key.dtype), of_value.to(self.value.dtype)

    def _tile(self, query: Tensor, start: int, rows: int) -> Tile:
        keys, offset = self.key.shape[-2], self.seen.offset
        if type(offset) is int and offset == 0:  # a symbolic offset differs between ranks
            keys = min(keys, start + rows)
        mask, factors = self.seen.block(start, rows, keys)
        if mask is not None and self.seen.drops is None:
            mask = mask.reshape(*mask.shape[:-2], *[1] * (query.dim() - mask.dim()), rows, keys)
        return Tile(_rows(self.key, 0, keys), _rows(self.value, 0, keys), mask, False, self.scale, factors)


def _blocks(query: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the first row and the number of rows of each block."""
    length = query.shape[-2]
    for start in range(0, length, ROWS_AT_ONCE) or [0]:
        yield start, min(ROWS_AT_ONCE, length - start)


def _rows(x: Tensor, start: int, rows: int) -> Tensor:
    return x.narrow(-2, start, rows)


def _add(total: Tensor, x: Tensor) -> Tensor:
    """Return the sum of `total` and of `x`, which has the first rows of it."""
    missing = total.shape[-2] - x.shape[-2]
    return total + (F.pad(x, (0, 0, 0, missing)) if missing else x)
