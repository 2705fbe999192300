"""Attention of some rows to some keys, where a row sees only the keys of its own document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_tiles import Rows, Tile, wide

ROWS_AT_ONCE = 512
"""The number of rows whose mask is held at once."""


class Documents(NamedTuple):
    """The numbers of the documents of rows (batch, s, 1) and of keys (batch, t, 1).

    With an `offset`, row i sees no key after key i + offset either.
    """

    rows: Tensor
    keys: Tensor
    offset: int | None = None

    def mask(self, start: int, rows: int, keys: int) -> Tensor:
        """Return the mask (batch, rows, keys) of some rows from `start` on, and of the first keys."""
        seen = self.rows.narrow(-2, start, rows) == self.keys.narrow(-2, 0, keys).mT
        if self.offset is None:
            return seen
        place = torch.arange(rows, device=seen.device) + (start + self.offset)
        return seen & (place.unsqueeze(-1) >= torch.arange(keys, device=seen.device))


@dataclass(frozen=True, slots=True)
class DocumentTile:
    """A tile whose mask follows from documents. It is computed in blocks of rows, so only one block's mask is held."""

    key: Tensor
    value: Tensor
    documents: Documents
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
        keys = self.key.shape[-2]
        offset = self.documents.offset
        if type(offset) is int and offset == 0:  # a symbolic offset differs between ranks
            keys = min(keys, start + rows)
        mask = self.documents.mask(start, rows, keys)
        mask = mask.reshape(*mask.shape[:-2], *[1] * (query.dim() - mask.dim()), rows, keys)
        return Tile(_rows(self.key, 0, keys), _rows(self.value, 0, keys), mask, False, self.scale)


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
    return total + (torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x)
