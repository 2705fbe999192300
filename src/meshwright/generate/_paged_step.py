"""The decode step with keys and values in pages.

The memory of a layer has all pages of a rank with rows of its own, one after the other. A step writes the page and the
position of each row. Then it copies the pages of all rows into one tensor, which the layer's attention reads.

Shapes: as in `_decode_step`; b ranks with rows of their own, n positions of all pages of a rank, p pages of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._decode_step import Append, DecodeStep, RowCopy, StepSize, local
from ._pages import page_count
from ._read_pages import read_pages


class PagedStep(DecodeStep):
    """A step whose `table` [r, p] has the numbers of each row's pages, on the rank of the row."""

    table: Tensor

    def __init__(self, model: nn.Module, layers: Sequence[Any], size: StepSize, logits_rv: Tensor) -> None:
        super().__init__(model, layers, size, logits_rv)
        assert size.pool is not None
        self.page_size = size.pool.size
        pages = page_count(size.capacity, self.page_size)
        table = torch.zeros(size.rows.held, pages, dtype=torch.int64, device=logits_rv.device)
        self.register_buffer("table", size.rows.joined(table), False)

    @property
    def columns(self) -> int:
        return self.table.shape[1] * self.page_size

    def append(self, places_r1: Tensor) -> Append:
        ranks, size, table_rp = self.rows.ranks, self.page_size, self.table
        pages_r1 = table_rp.gather(1, places_r1 // size)
        columns_b1q1 = (pages_r1 * size + places_r1 % size).view(ranks, 1, -1, 1)

        def append(memory_bhnd: Tensor, new_rh1d: Tensor) -> Tensor:
            new_bhqd = new_rh1d[:, :, 0].unflatten(0, (ranks, -1)).transpose(1, 2)
            memory_bhnd.scatter_(2, columns_b1q1.expand(new_bhqd.shape), new_bhqd)
            return read_pages(memory_bhnd, table_rp, size)

        return append

    def write(self, memory: Tensor, copy: RowCopy, new_hsd: Tensor) -> None:
        positions_s = torch.arange(copy.first, copy.first + new_hsd.shape[1], device=new_hsd.device)
        pages_s = local(self.table)[copy.slot, positions_s // self.page_size]
        memory[0].index_copy_(1, pages_s * self.page_size + positions_s % self.page_size, new_hsd)

    def set_pages(self, slot: int, pages: Sequence[int], first: int = 0) -> None:
        """Give a slot of this rank these pages, from page `first` of the row on."""
        here = torch.tensor(pages, dtype=torch.int64, device=self.table.device)
        local(self.table)[slot, first : first + len(pages)] = here

    def clear(self, slot: int) -> None:
        """Take all pages from a slot of this rank."""
        local(self.table)[slot].zero_()
