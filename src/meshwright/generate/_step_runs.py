"""Runs of decode steps: eager at first, then as a program that gave the logits of the eager step.

Shapes: r rows, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm import current_communicator, get_rank, world_ranks
from meshwright.engine import DistModel, Strategy, to_static, unshard_dtensor
from meshwright.fixed_order import in_same_numbers
from meshwright.layout import warn_user
from meshwright.passes import OneRowProducts
from meshwright.tensor import fast_products, has_fast_products, has_wide_vectors

from ._decode_step import DecodeStep, StepSize
from ._errors import EagerStepWarning
from ._paged_step import PagedStep
from ._request import GenerationRequest
from ._rows import Rows

BLOCK = 64
"""Memory is taken for a multiple of so many positions, so that calls of similar lengths use one program."""
MOST_STEPS = 2
"""Most decode steps that a sampler keeps, each with its memory and its program; the oldest is dropped first."""

STRATEGY = Strategy.of(fused_passes={"enable": True}, passes=(OneRowProducts(),))


@dataclass(slots=True)
class StepRun:
    """A decode step, its program once there is one, and the number of its runs."""

    step: DecodeStep
    runs: int = 0
    program: DistModel | None = None
    is_ready: bool = False
    """True if the program has the present setting, such as hooks, modes and parameters."""
    is_checked: bool = False
    """True if the step gave the logits of a call with the cache of transformers."""


@dataclass(slots=True)
class StepRuns:
    """The decode steps of a sampler.

    A step is recorded after `static_after` runs; recording takes the time of many eager steps. None never records.
    """

    static_after: int | None
    known: list[StepRun] = field(default_factory=list[StepRun])
    rows: Rows | None = None
    """The distribution of the rows that a first pass had; None before, and after a call that had another one."""
    eager_because: str = ""
    """The reason why no step is recorded; "" if steps are."""
    has_fast_products: bool | None = None
    """True if all ranks have faster kernels of products than torch's; None before the first call."""
    _records: bool = False
    _inside: ExitStack = field(default_factory=ExitStack)
    is_off: bool = False
    """True if a step gave other logits than the model with a cache of transformers."""

    @contextmanager
    def call(self, is_distributed: bool) -> Generator[None]:
        """Record steps inside if the model is distributed, and use the fastest kernels of products that all ranks have.

        What the programs depend on is compared once inside, not for each token: nothing but tensors changes there.
        """
        self._records = is_distributed and self.static_after is not None
        is_fast = not in_same_numbers() and (not is_distributed or self._all_have_fast_products())
        with ExitStack() as self._inside, fast_products(is_fast):
            for run in self.known:
                run.is_ready = False
                if run.program is not None:
                    self._inside.enter_context(run.program.unchanged())
            yield

    def _all_have_fast_products(self) -> bool:
        """True if all ranks have faster kernels that add up in the same order.

        With different kernels, ranks would round equal logits differently.
        """
        if self.has_fast_products is None:
            is_wide = has_wide_vectors()
            flags = torch.tensor([not has_fast_products(), is_wide, not is_wide], device="cpu")
            lacks, *widths = current_communicator().all_reduce(flags, "any", world_ranks()).tolist()
            self.has_fast_products = not lacks and not all(widths)
        return self.has_fast_products

    def clear(self) -> None:
        """Drop all steps with their memory; the next long call records a program again."""
        self.known = []

    def take(self, model: nn.Module, layers: Sequence[Any], size: StepSize, logits_rv: Tensor) -> StepRun:
        """Return the step of this size for the layers of a cache; its memory is zero."""
        found = next((run for run in self.known if run.step.fits(layers, size)), None)
        if found is None:
            kind = DecodeStep if size.pool is None else PagedStep
            found = StepRun(kind(model, layers, size, logits_rv).eval())
            self.known = [*self.known[1 - MOST_STEPS :], found]
        for memory in found.step.buffers(recurse=False):
            memory.zero_()
        return found

    def logits(self, run: StepRun, tokens_r1: Tensor, places_r1: Tensor) -> Tensor:
        """Return the logits [r, v] after these tokens at these positions."""
        if not run.is_ready:
            self._prepare(run, tokens_r1, places_r1)
        run.runs += 1
        (run.program or run.step)(tokens_r1, places_r1)
        return run.step.logits

    def _prepare(self, run: StepRun, tokens_r1: Tensor, places_r1: Tensor) -> None:
        """Record the step, if that is due, unless there is a program for the present setting."""
        if run.program is None or not run.program.has_program(tokens_r1, places_r1):
            is_recorded = not self.eager_because and self._is_due(run.runs)
            run.program = self._recorded(run, tokens_r1, places_r1) if is_recorded else None
        run.is_ready = run.program is not None

    def refuse(self, why: str, request: GenerationRequest) -> None:
        """Warn that a call takes no steps, if a program was expected.

        Raises:
            GenerationError: the request is for pages, which only steps have.
        """
        request.refuse_pages(why)
        if self._is_due(request.max_new_tokens - 1):
            self.stay_eager(why)

    def _is_due(self, runs: int) -> bool:
        """True if a step is recorded after so many runs."""
        return self._records and self.static_after is not None and runs >= self.static_after

    def stay_eager(self, why: str) -> None:
        """Record no step from now on, and warn with the reason."""
        if not self.eager_because:
            self.eager_because = why
            if get_rank() == world_ranks()[0]:
                warn_user(f"the decode step of the sampler runs eagerly: {why}", EagerStepWarning)

    def _recorded(self, run: StepRun, tokens_r1: Tensor, places_r1: Tensor) -> DistModel | None:
        """Return a program of a step, or None if it cannot be recorded or gives other logits on any rank."""
        step, program = run.step, run.program
        if program is None:
            program = to_static(step, strategy=STRATEGY)
            self._inside.enter_context(program.unchanged())
        try:
            program.compile(tokens_r1, places_r1)
        except Exception as error:
            self.stay_eager(f"it cannot be recorded: {type(error).__name__}: {error}")
            return None
        step(tokens_r1, places_r1)
        wanted_rv = step.rows.logits_here(step.logits).clone()
        program(tokens_r1, places_r1)  # writes the same keys and values again
        if same_logits(step.rows, step.rows.logits_here(step.logits), wanted_rv):
            return program
        self.stay_eager("its program gives other logits")
        return None


def rounded(positions: int) -> int:
    """Return the number of positions for which memory is taken."""
    return -(-positions // BLOCK) * BLOCK


def same_logits(rows: Rows, found_rv: Tensor, wanted_rv: Tensor) -> bool:
    """True if the logits of all rows on all ranks are equal but for rounding; NaN is equal to everything."""
    bound_r1 = wanted_rv.abs().amax(-1, keepdim=True) * torch.finfo(wanted_rv.dtype).eps ** 0.5
    other_r = ((found_rv - wanted_rv).abs() > bound_r1).any(-1)
    return not bool(unshard_dtensor(rows.joined(other_r)).any())
