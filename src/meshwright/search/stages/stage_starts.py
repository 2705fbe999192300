"""Layers at which the stages of a pipeline may begin, in the order of lower bounds on the time of a step.

Each stage gives a lower bound. Its first backward comes after a microbatch went to the last stage and back, and after
the forwards that the table has before it. Then the stage does all its other work, and the stages before it do their
backwards. Work that is done once per step comes last. This bound depends only on the layers at which the stage begins
and ends. Dynamic programming over (stages, layers) gives the least bound of all that follows a beginning. A search
guided by it yields all starts in order (A*).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf

import numpy as np

from meshwright.pipeline import ActionKind, Schedule, peaks

from ..sharding.variable_elimination import Costs
from .layer_costs import ONCE, LayerCosts, LinkTimes

Starts = tuple[int, ...]


def starts_by_bound(
    layers: LayerCosts, table: Schedule, memory_limit: float, links: LinkTimes
) -> Iterator[tuple[float, Schedule, Starts]]:
    """Yield lower bounds on the seconds of a step, in order, with the table and the starts of all stages but the first.

    Each rank has one chunk. Only stages that fit into `memory_limit` bytes per rank are used.
    """
    needs = list(_stage_bounds(layers, table, memory_limit, links))
    behind = _least_behind(needs)
    waiting: list[tuple[float, int, float, Starts]] = [(float(behind[0][0]), 0, 0.0, ())]
    while waiting:
        bound, stage, total, ends = heappop(waiting)
        if -stage == len(needs):
            yield bound, table, ends[:-1]
            continue
        begin = ends[-1] if ends else 0
        least = np.maximum(np.maximum(needs[-stage][begin], behind[1 - stage]), bound)
        for end in np.flatnonzero(least < inf):
            alike = total + float(needs[-stage][begin, end]) ** 2
            heappush(waiting, (float(least[end]), stage - 1, alike, (*ends, int(end))))


def _least_behind(needs: Sequence[Costs]) -> list[Costs]:
    """Return the least bound of each stage and those after it, by the layer at which the stage begins.

    The last row is for no stage.
    """
    last = np.full(len(needs[0]), inf)
    last[-1] = 0.0
    found = [last]
    for need in reversed(needs):
        found.append(np.maximum(need, found[-1]).min(axis=1))
    return found[::-1]


def _stage_bounds(layers: LayerCosts, table: Schedule, memory_limit: float, links: LinkTimes) -> Iterator[Costs]:
    """Yield each stage's lower bound on the seconds of a step, by the layers at which it and the next one begin."""
    count, m, stages = len(layers.whole), table.microbatches, table.ranks
    forward, backward, weight = map(layers.summed, ("forward", "backward", "weight"))
    if any(action.kind is ActionKind.BACKWARD for row in table.rows for action in row):
        backward, weight = backward + weight, 0.0 * weight
    way = min((float(links.message(nbytes)) for nbytes in layers.sent[:-1]), default=0.0)
    once = links.once(*(_between_boundaries(layers.summed(name)) for name in ONCE))
    nothing = np.tri(count + 1, dtype=bool)
    for stage, (row, alive) in enumerate(zip(table.rows, peaks(table), strict=True)):
        warm = next(n for n, action in enumerate(row) if action.kind is not ActionKind.FORWARD)
        before, came_back = forward + stage * way, backward + stage * way
        back = forward[-1] + (stages - 1) * way + backward[-1] - backward + (stages - 1 - stage) * way
        own, own_back, own_weight = (_between_boundaries(x) for x in (forward, backward, weight))
        first = np.maximum(back[None, :], before[:, None] + warm * own)
        need = first + (m - warm) * own + m * own_back + np.maximum(came_back[:, None], m * own_weight)
        yield np.where(nothing | (_held_bytes(layers, alive) > memory_limit), inf, need + once)


def _held_bytes(layers: LayerCosts, alive: float) -> Costs:
    """Return the bytes of a stage with `alive` microbatches, by the layers at which it and the next one begin."""
    came = np.array([0.0, *layers.sent])
    between = _between_boundaries(layers.summed("static")) + layers.brief_between
    return between + alive * (_between_boundaries(layers.summed("held")) + came[:, None])


def _between_boundaries(sums: Costs) -> Costs:
    """Return the costs of the layers from each boundary to each other, as a matrix."""
    return sums[None, :] - sums[:, None]
