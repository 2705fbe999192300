"""Slots for a request: with a row of memory each, or with pages.

In the first call of a sampler, a pass over one token for each rank finds the distribution of rows and the kind of the
cache. Later calls expect the same, and compare it with their first prompts.
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.comm import world_ranks
from meshwright.tensor import DistTensor

from ._calls import CachedCalls, decoder_cache
from ._decode_step import why_no_steps
from ._errors import GenerationError
from ._paged_slots import PagedSlots
from ._pages import PagePool, page_count
from ._request import GenerationRequest
from ._rows import Rows
from ._slots import Slots
from ._step_runs import StepRuns, rounded

PAGE_SIZE = 64
"""Positions of a page, if a request has `cache_positions` only."""


def slots_for(
    model: nn.Module, device: torch.device, runs: StepRuns, request: GenerationRequest, count: int
) -> Slots | None:
    """Return at least `count` slots, the same number on each rank with rows of its own; None if no step fits the model.

    Raises:
        GenerationError: pages are requested and no step fits the model, or the pages of a rank are too few for one row.
    """
    cache_name, capacity = decoder_cache(model), rounded(request.positions)
    if cache_name is None or runs.is_off:
        runs.refuse("the model is no decoder of transformers that takes a cache, a mask and positions", request)
        return None
    is_distributed = any(isinstance(p, DistTensor) for p in model.parameters())
    ranks = len(world_ranks()) if is_distributed else 1
    if runs.rows is None:
        probe = CachedCalls(model, [[0]] * ranks, device, cache_name, request.max_new_tokens)
        request.check_stop(probe.first().shape[-1])
        why = why_no_steps(probe.layers, probe.rows, capacity)
        if why:
            runs.refuse(why, request)
            return None
        runs.rows = probe.rows.resized(ranks)
    blocks = ranks // runs.rows.held
    rows = runs.rows.resized(-(-count // blocks) * blocks)
    pool = _pool(request, rows, capacity)
    kind = Slots if pool is None else PagedSlots
    return kind(model, device, cache_name, runs, rows, request, capacity, pool)


def _pool(request: GenerationRequest, rows: Rows, capacity: int) -> PagePool | None:
    """Return the pages for these rows: at most those of the request or of all rows; None for a request without pages.

    Raises:
        GenerationError: the pages of a rank are too few for one row.
    """
    if not request.is_paged:
        return None
    size, ranks = min(request.page_size or PAGE_SIZE, capacity), rows.ranks
    most, least = rows.held * page_count(capacity, size), page_count(request.positions, size)
    if request.cache_positions is None:
        return PagePool(most, size)
    count = page_count(-(-request.cache_positions // ranks), size)
    if count < least:
        longest = max(map(len, request.prompts))
        raise GenerationError(
            f"tokens with cache_positions={request.cache_positions}",
            f"a prompt of {longest} tokens and {request.max_new_tokens} new ones: {least} pages of {size} positions",
            f"each rank with rows of its own has {count} pages; number of these ranks: {ranks}",
            f"pass cache_positions={least * size * ranks} or more",
        )
    return PagePool(min(count, most), size)
