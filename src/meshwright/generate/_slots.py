"""Slots for rows: a prompt enters a free slot, and each step gives the logits of one more token in all slots.

A slot is a row of a decode step. The slots of a rank are filled from prompts that the same rank computed,
so keys and values are never sent. Equal prompts that enter slots of one rank together are computed once.

Shapes: r slots, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ._calls import CachedCalls
from ._decode_step import DecodeStep, RowCopy, StepSize, why_no_steps
from ._pages import PagePool
from ._request import GenerationRequest, Prompt
from ._rows import Rows
from ._step_runs import StepRun, StepRuns, same_logits

LENGTHS, COUNTS = 16, 4
"""Later prompts are padded to a multiple of so many tokens and rows: the calls of each size are planned anew."""


@dataclass(slots=True)
class Slots:
    """The slots of a call. Every rank makes the same calls; logits are those of this rank's slots."""

    model: nn.Module
    device: torch.device
    cache_name: str
    runs: StepRuns
    rows: Rows
    request: GenerationRequest
    capacity: int
    """Number of positions for which a row has columns."""
    pool: PagePool | None = None
    run: StepRun | None = None
    """The step, which the first prompts choose by their cache."""
    first_calls: tuple[CachedCalls, dict[int, int]] | None = None
    """The first prompts in their own cache, and the slot of this rank for each of its rows there, for a comparison."""

    def reserve(self, slot: int, prompt: Prompt) -> bool:
        """Reserve memory for a prompt and all new tokens; False if a row has to leave before."""
        return True

    def release(self, slot: int) -> None:
        """Make the memory of a slot free."""

    def admit(self, prompts: Mapping[int, Prompt]) -> Tensor | None:
        """Fill slots, by their numbers among all slots; return the logits after the prompts in this rank's slots.

        None if steps do not fit the model.
        """
        of_ranks = self._different(prompts)
        most = self._padded_count(max(map(len, of_ranks)))
        batch = [prompt for each in of_ranks for prompt in (*each, *[(0,)] * (most - len(each)))]
        is_even = len(set(map(len, batch))) == 1
        multiple = 1 if self.rows.mesh is None or (is_even and self.run is None) else LENGTHS
        new_tokens = self.request.max_new_tokens
        chunk = self.request.prefill_chunk_size
        calls = CachedCalls(self.model, batch, self.device, self.cache_name, new_tokens, multiple, chunk)
        all_logits_rv = calls.first()
        run = self.run = self.run or self._first_run(calls, all_logits_rv)
        if run is None:
            return None
        logits_rv = calls.rows_after(all_logits_rv)
        held, first = self.rows.held, self.rows.first
        mine = {slot - first: prompt for slot, prompt in prompts.items() if self.rows.has(slot)}
        sources = [of_ranks[first // held].index(prompt) for prompt in mine.values()]
        starts = [calls.ids_rs.shape[1] - len(prompt) for prompt in mine.values()]
        self._fill(run.step, calls, list(map(RowCopy, mine, sources, starts)))
        if not run.is_checked and self.first_calls is None:
            self.first_calls = calls, dict(zip(sources, mine, strict=True))
        return logits_rv[torch.tensor(sources, dtype=torch.int64, device=logits_rv.device)]

    def _fill(self, step: DecodeStep, calls: CachedCalls, copies: Sequence[RowCopy]) -> None:
        """Copy the keys of prompts into the memory of the step."""
        step.fill(calls.layers, copies)

    def _first_run(self, calls: CachedCalls, logits_rv: Tensor) -> StepRun | None:
        """Return the step for the cache of the first prompts; None if no step fits it, or its rows are elsewhere."""
        self.request.check_stop(logits_rv.shape[-1])
        why = why_no_steps(calls.layers, calls.rows, self.capacity)
        if why:
            self.runs.rows = None
            self.runs.refuse(why, self.request)
            return None
        if calls.rows.resized(self.rows.count) != self.rows:
            self.runs.rows = None
            self.request.refuse_pages("the rows are on other ranks than those of the calls before")
            return None
        size = StepSize(self.rows, self.capacity, self.pool)
        return self.runs.take(self.model, calls.layers, size, logits_rv)

    def _padded_count(self, count: int) -> int:
        """Return the rows of each rank for so many prompts: few different numbers on several ranks."""
        return count if self.rows.mesh is None else min(self.rows.held, -(-count // COUNTS) * COUNTS)

    def _different(self, prompts: Mapping[int, Prompt]) -> list[list[Prompt]]:
        """Return the different prompts of the slots of each rank with rows of its own."""
        found: list[dict[Prompt, None]] = [{} for _ in range(self.rows.ranks)]
        for slot, prompt in prompts.items():
            found[slot // self.rows.held][prompt] = None
        return [list(each) for each in found]

    def step(self, tokens_r: Tensor, places: Sequence[int]) -> Tensor | None:
        """Return the logits [r, v] after these tokens of this rank's slots; None if steps do not fit the model.

        `places` are the positions of the tokens in all slots.
        """
        run = self.run
        assert run is not None
        places_r1 = self.rows.spread(torch.tensor(places, device=self.device)[:, None])
        logits_rv = self.runs.logits(run, self.rows.joined(tokens_r[:, None]), places_r1)
        logits_rv = self.rows.logits_here(logits_rv)
        if not run.is_checked and not self._is_equal(run, logits_rv, tokens_r):
            self.runs.is_off = True
            self.runs.refuse("a step with a mask of four dims gives other logits", self.request)
            return None
        return logits_rv

    def _is_equal(self, run: StepRun, logits_rv: Tensor, tokens_r: Tensor) -> bool:
        """True if the model with its own cache gives the logits of the first step; all ranks agree."""
        assert self.first_calls is not None
        calls, slot_of = self.first_calls
        slots = torch.tensor([slot_of.get(row, 0) for row in range(calls.rows.held)], device=self.device)
        is_filler_r1 = torch.tensor([[row not in slot_of] for row in range(calls.rows.held)], device=self.device)
        found_rv = logits_rv[slots]
        wanted_rv = calls.rows_after(calls.after(calls.rows.joined(tokens_r[slots][:, None])))
        run.is_checked = same_logits(calls.rows, found_rv, torch.where(is_filler_r1, found_rv, wanted_rv))
        self.first_calls = None
        return run.is_checked
