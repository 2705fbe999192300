"""Layers shared out over the chunks of a pipeline, and the schedule that takes least time for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from heapq import merge
from itertools import islice
from math import inf
from operator import itemgetter
from typing import NamedTuple

from meshwright.pipeline import Schedule, Timeline, simulate

from ._at_once import AtOnce, Layers
from ._chunk_starts import ChunkStarts
from ._layer_costs import ONCE, LayerCosts, Links, Numbers
from ._starts import Starts, in_order
from ._tables import one_each, several_each

RUN = 2**14
"""Chunks times microbatches that are run, all tables of one chunk per rank together, and all others."""
TOGETHER = 32
"""So many are run at once."""
SHORTER = 1e-6
"""What takes less by this part is no shorter."""


@dataclass(frozen=True)
class Balanced:
    """Where chunks begin, what they take each, and the schedule run action by action."""

    starts: Starts
    costs: LayerCosts = field(repr=False)
    timeline: Timeline = field(repr=False)
    links: Links = field(repr=False)

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @cached_property
    def seconds(self) -> float:
        """Those of a step: the table's, and of what the stages do once."""
        rows = (self.of_stages(getattr(self.costs, name)) for name in ONCE)
        return self.timeline.makespan + max(float(self.links.once(*own)) for own in zip(*rows, strict=True))

    @cached_property
    def held(self) -> Numbers:
        """The most bytes that a rank of each stage holds."""
        return tuple(a + b for a, b in zip(self.timeline.peaks(self.costs.memory), self.brief, strict=True))

    @cached_property
    def static(self) -> Numbers:
        """The bytes of each stage that stay: weights, gradients and states."""
        return self.of_stages(self.costs.static)

    @cached_property
    def brief(self) -> Numbers:
        """The most bytes of each stage while a layer is made again: one is at a time."""
        return self.of_stages(self.costs.brief, max)

    def of_stages(self, numbers: Numbers, of: Callable[[Iterator[float]], float] = sum) -> Numbers:
        """What the chunks of each stage have together."""
        way = self.schedule.ways[0]
        stages = range(self.schedule.ranks)
        return tuple(of(x for x, at in zip(numbers, way, strict=True) if at == stage) for stage in stages)


def balance(
    layers: LayerCosts, stages: int, microbatches: int, room: float, links: Links, limit: float = inf
) -> Balanced | None:
    """The chunks and the schedule of least time that fit into `room` bytes a rank; None where none do, or where all
    take `limit` seconds or more.

    Several chunks on each rank are taken where they take less than one.
    """
    every = Layers(layers, links)
    if _at_least(layers, stages, microbatches) >= limit:
        return None
    one = _one_each(every, stages, microbatches, room, limit)
    several = _several(every, stages, microbatches, room)
    best = one if one is not None and (several is None or several.seconds >= one.seconds * (1 - SHORTER)) else several
    if best is None or best.seconds >= limit:
        return None
    costs = layers.chunks(best.starts)
    return Balanced(best.starts, costs, simulate(best.table, costs.times(links)), links)


def fits(layers: LayerCosts, stages: int, microbatches: int, room: float, links: Links) -> bool:
    """Whether stages of one chunk fit into `room` bytes a rank."""
    tables = (runs.schedule for runs in one_each(stages, microbatches))
    return any(next(in_order(layers, table, room, links), None) is not None for table in tables)


def _at_least(layers: LayerCosts, stages: int, microbatches: int) -> float:
    """Seconds of the mean rank: its work, and what it waits for until a microbatch is there, which had a layer on each
    rank before.
    """
    come = layers.summed("forward")[:stages].sum() / stages
    return microbatches * sum(layers.whole) / stages + float(come)


class _Best(NamedTuple):
    """The seconds of a step by a table whose chunks begin at these layers."""

    seconds: float
    table: Schedule
    starts: Starts


def _one_each(layers: Layers, stages: int, microbatches: int, room: float, limit: float) -> _Best | None:
    """One chunk on each rank.

    Tables are run, with stages that begin at all layers they may, in the order of what they take at the least, until no
    other can be faster. Where that would be many, the fastest of the first of them is taken.
    """
    steps = {runs.schedule.name: AtOnce(layers, runs, room) for runs in one_each(stages, microbatches)}
    ordered = (in_order(layers.costs, step.runs.schedule, room, layers.links) for step in steps.values())
    waiting = islice(merge(*ordered, key=itemgetter(0)), max(1, RUN // (stages * microbatches)))
    best: _Best | None = None
    while few := [*islice(waiting, TOGETHER)]:
        if few[0][0] >= min(best.seconds * (1 - SHORTER) if best is not None else limit, limit):
            break
        for name in dict.fromkeys(table.name for _, table, _ in few):
            (found,) = steps[name].best(starts for _, table, starts in few if table.name == name)
            if best is None or found.seconds < best.seconds * (1 - SHORTER):
                best = _Best(found.seconds, steps[name].runs.schedule, found.starts)
    return best


def _several(layers: Layers, stages: int, microbatches: int, room: float) -> _Best | None:
    """Several chunks on each rank: starts are looked for under one table after the other, the most promising first."""
    tables = several_each(stages, microbatches, layers.count)
    searches = [ChunkStarts(AtOnce(layers, runs, room)) for runs in tables]
    left = RUN
    for search in sorted(searches, key=lambda s: s.best):
        while not search.is_done and left > 0:
            left -= search.go_on()
    best = min(searches, key=lambda s: s.best, default=None)
    if best is None or best.best.excess > 0:
        return None
    return _Best(best.best.seconds, best.table, best.best.starts)
