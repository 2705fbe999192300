"""Division of layers over the parts of a pipeline, and of parts over its ranks.

A part is the chunk of layers that a rank runs without a message in between; a model has as many parts as ranks times
chunks. If the layers do not divide evenly, the heaviest part has one layer less, as often as necessary. The last part
counts the head and the first part the embedding. Of equally heavy parts, the last one has fewer layers.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np

from meshwright.cost import Flags, Numbers

from .degrees import Degrees
from .schedule_facts import placement
from .sizes import Transformer

EMBEDDING = 1.0
"""Number of layers that the embedding counts as, as in the recipes of Megatron and of the zero-bubble schedules."""


class RankLayers(NamedTuple):
    """Layers of one pipeline rank, without and with experts, and whether it has the embedding and the head."""

    rank: Numbers
    dense: Numbers
    sparse: Numbers
    first: Flags
    last: Flags


@lru_cache(maxsize=4096)
def part_sizes(model: Transformer, parts: int) -> tuple[int, ...]:
    """Return the number of layers of each part.

    >>> part_sizes(Transformer(30, 4096, 32, 32, 128, 14336, 32000), 8)
    (3, 4, 4, 4, 4, 4, 4, 3)
    >>> part_sizes(Transformer(61, 4096, 32, 8, 128, 14336, 128256), 16)
    (3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2)
    """
    most = ceil(model.layers / parts)
    sizes, loads = [most] * parts, np.full(parts, float(most))
    if parts > 1:
        loads[0] += EMBEDDING
        loads[-1] += model.head_layers
    for _ in range(most * parts - model.layers):
        able = np.where(np.asarray(sizes) > 0, loads, -1.0)
        heaviest = parts - 1 - int(np.argmax(able[::-1]))
        sizes[heaviest] -= 1
        loads[heaviest] -= 1
    return tuple(sizes)


def part_kinds(model: Transformer, parts: int) -> tuple[tuple[int, int], ...]:
    """Return the layers without and with experts of each part; those without experts come first in a model.

    The last part also has the layers that predict further tokens.
    """
    sizes = part_sizes(model, parts)
    ends = np.minimum(np.cumsum([0, *sizes]), model.dense_layers)
    dense = [int(n) for n in np.diff(ends)]
    *kinds, (plain, sparse) = ((n, size - n) for n, size in zip(dense, sizes, strict=True))
    last = (plain + model.ahead, sparse) if model.experts is None else (plain, sparse + model.ahead)
    return (*kinds, last)


@lru_cache(maxsize=4096)
def rank_layers(model: Transformer, schedule: str, ranks: int, chunks: int) -> tuple[RankLayers, ...]:
    """Return the layers of each rank of a pipeline."""
    kinds, where = part_kinds(model, ranks * chunks), placement(schedule, ranks, chunks)
    own = [[kind for kind, at in zip(kinds, where, strict=True) if at == rank] for rank in range(ranks)]
    return tuple(
        RankLayers(rank, sum(n for n, _ in mine), sum(n for _, n in mine), where[0] == rank, where[-1] == rank)
        for rank, mine in enumerate(own)
    )


@lru_cache(maxsize=4096)
def _different_ranks(model: Transformer, schedule: str, ranks: int, chunks: int) -> tuple[RankLayers, ...]:
    """Return the first of all ranks whose layers are alike."""
    found: dict[tuple[object, ...], RankLayers] = {}
    for own in rank_layers(model, schedule, ranks, chunks):
        found.setdefault(own[1:], own)
    return tuple(found.values())


def different_ranks(model: Transformer, plan: Degrees) -> tuple[RankLayers, ...]:
    """Return ranks of each plan's pipeline, as arrays, such that every other rank is like one that comes before it.

    A plan with fewer different ranks than others repeats its last one.
    """
    shape = np.broadcast_shapes(np.shape(plan.pp), np.shape(plan.chunks))
    pairs = np.stack([np.broadcast_to(n, shape).ravel() for n in (plan.pp, plan.chunks)]).astype(int)
    distinct, index = np.unique(pairs, axis=1, return_inverse=True)
    found = [_different_ranks(model, plan.schedule, int(p), int(v)) for p, v in distinct.T]
    most = max((len(own) for own in found), default=1)
    return tuple(_nth(found, n, np.ravel(index), shape) for n in range(most))


def _nth(found: list[tuple[RankLayers, ...]], n: int, index: np.ndarray, shape: tuple[int, ...]) -> RankLayers:
    """Return the n-th rank of each plan, or its last one."""
    own = [ranks[min(n, len(ranks) - 1)] for ranks in found]
    columns = (np.array(column)[index].reshape(shape) for column in zip(*own, strict=True))
    rank, dense, sparse, first, last = columns
    return RankLayers(rank.astype(float), dense.astype(float), sparse.astype(float), first, last)
