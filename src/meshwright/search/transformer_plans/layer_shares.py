"""Division of layers over the parts of a pipeline, and of parts over its ranks.

A part is the chunk of layers that a rank runs without a message in between; a model has as many parts as ranks times
chunks. Parts are as equal as possible. If the layers do not divide evenly, the last part has one layer less than most
parts, and then the first part. If still more layers are missing, the last part has fewer layers, by at most the cost of
the head in layers. Then the other parts have one layer less, beginning at the back.
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
    sizes, spare = [most] * parts, most * parts - model.layers
    if parts == 1:
        return tuple(sizes)
    before = min(max(spare - 1, 0), 1)
    behind = min(spare - before, most, ceil(model.head_layers))
    sizes[0] -= before
    sizes[-1] -= behind
    for n in range(spare - behind - before):
        sizes[-2 - n] -= 1
    return tuple(sizes)


def part_kinds(model: Transformer, parts: int) -> tuple[tuple[int, int], ...]:
    """Return the layers without and with experts of each part; those without experts come first in a model."""
    sizes = part_sizes(model, parts)
    ends = np.minimum(np.cumsum([0, *sizes]), model.dense_layers)
    dense = [int(n) for n in np.diff(ends)]
    return tuple((n, size - n) for n, size in zip(dense, sizes, strict=True))


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
