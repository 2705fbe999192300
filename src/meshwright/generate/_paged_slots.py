"""Slots whose keys and values are in pages: rows take pages as they grow, and give them back when they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from torch import Tensor

from ._calls import CachedCalls
from ._decode_step import DecodeStep, RowCopy
from ._paged_step import PagedStep
from ._pages import Pages
from ._request import Prompt
from ._slots import Slots


@dataclass
class PagedSlots(Slots):
    """Slots with pages. Every rank counts the pages of all ranks."""

    pages: list[Pages] = field(init=False)
    """The pages of each rank with rows of its own."""

    def __post_init__(self) -> None:
        assert self.pool is not None
        self.pages = [Pages(self.pool) for _ in range(self.rows.ranks)]

    def reserve(self, slot: int, prompt: Prompt) -> bool:
        new_tokens = self.request.max_new_tokens
        return self._pages(slot).enter(slot, prompt, len(prompt) + new_tokens - 1)

    def release(self, slot: int) -> None:
        self._pages(slot).leave(slot)
        if self.rows.has(slot):
            self._step.clear(slot - self.rows.first)

    def step(self, tokens_r: Tensor, places: Sequence[int]) -> Tensor | None:
        for slot, place in enumerate(places):
            row = self._pages(slot).rows.get(slot)
            if row is not None and self._pages(slot).grow(slot, place) and self.rows.has(slot):
                self._step.set_pages(slot - self.rows.first, row.pages[-1:], len(row.pages) - 1)
        return super().step(tokens_r, places)

    def _fill(self, step: DecodeStep, calls: CachedCalls, copies: Sequence[RowCopy]) -> None:
        """Copy the keys of prompts into the pages that no other row has filled."""
        unfilled: list[RowCopy] = []
        for copy in copies:
            slot = copy.slot + self.rows.first
            row = self._pages(slot).rows[slot]
            cast(PagedStep, step).set_pages(copy.slot, row.pages)
            unfilled.append(replace(copy, first=row.filled * self._pages(slot).pool.size))
        super()._fill(step, calls, unfilled)

    @property
    def _step(self) -> PagedStep:
        assert self.run is not None
        assert isinstance(self.run.step, PagedStep)
        return self.run.step

    def _pages(self, slot: int) -> Pages:
        return self.pages[slot // self.rows.held]
