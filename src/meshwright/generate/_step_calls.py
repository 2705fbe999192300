"""Calls of a decoder of transformers by decode steps: the prompts with its own cache, then a step for each token.

Shapes: r rows, v vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from ._calls import CachedCalls, TokenCalls
from ._decode_step import why_no_steps
from ._rows import Rows
from ._step_runs import StepRun, StepRuns, rounded, same_logits


def with_steps(calls: TokenCalls, runs: StepRuns, new_tokens: int) -> TokenCalls:
    """Return calls by decode steps in place of these, if the model takes what a step passes."""
    if isinstance(calls, CachedCalls) and calls.takes_steps:
        return calls if runs.is_off else StepCalls(calls, runs)
    runs.refuse("the model has an encoder, or does not take a cache, a mask and positions", new_tokens)
    return calls


class StepCalls:
    """Calls whose cache is that of `cached` in the first call, and the memory of a decode step in later ones.

    The first step of a sampler is compared with a call of the model with its own cache. If they differ, or the cache
    has other layers than those that keep all positions, the later calls are those of `cached`.
    """

    rows: Rows

    def __init__(self, cached: CachedCalls, runs: StepRuns) -> None:
        self.cached, self.runs = cached, runs
        self.run: StepRun | None = None
        self.places_r1 = cached.mask_rs.sum(-1, keepdim=True)

    def first(self) -> Tensor:
        logits_rv, cached = self.cached.first(), self.cached
        self.rows = cached.rows
        why = why_no_steps(cached.layers, cached.rows, rounded(cached.capacity))
        if why:
            self.runs.refuse(why, cached.new_tokens)
        else:
            self.run = self.runs.take(cached.model, cached.layers, cached.rows, cached.capacity, logits_rv)
            self._fill(self.run)
        return logits_rv

    def _fill(self, run: StepRun) -> None:
        """Copy the keys and values of the prompts, without the padding before them, to this rank's memory."""
        pads = (self.cached.ids_rs.shape[1] - self.places_r1[:, 0]).tolist()
        mine = range(self.rows.held)
        run.step.fill(self.cached.layers, mine, mine, pads[self.rows.first : self.rows.first + self.rows.held])

    def after(self, tokens_r1: Tensor) -> Tensor:
        if self.run is None:
            return self.cached.after(tokens_r1)
        is_checked = self.run.is_checked
        wanted_rv = None if is_checked else self.rows.logits_here(self.cached.after(tokens_r1))
        logits_rv = self.runs.logits(self.run, tokens_r1, self.rows.spread(self.places_r1))
        self.places_r1 = self.places_r1 + 1
        if wanted_rv is not None and not same_logits(self.rows, self.rows.logits_here(logits_rv), wanted_rv):
            self.run, self.runs.is_off = None, True
            self.runs.refuse("a step with a mask of four dims gives other logits", self.cached.new_tokens)
            return self.rows.joined(wanted_rv)
        self.run.is_checked = True
        return logits_rv
