"""Division of layers into pipeline chunks, and the schedule that takes the least time for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import merge
from itertools import islice
from math import inf
from operator import itemgetter
from typing import NamedTuple

from meshwright.pipeline import Schedule, Timeline, simulate_schedule

from .batched_step_time import BatchedStepTime, LayerSums
from .chunk_starts import ChunkStarts
from .layer_costs import ONCE, LayerCosts, LinkTimes, Numbers
from .schedule_tables import one_chunk_tables, several_chunk_tables
from .stage_starts import Starts, starts_by_bound

RUN = 2**14
"""Limit of chunks times microbatches simulated: one for all tables of one chunk per rank, one for the others."""
TOGETHER = 32
"""Number of candidates that are simulated at once."""
SHORTER = 1e-6
"""Relative difference in seconds below which a step does not count as shorter."""


@dataclass(frozen=True)
class Balanced:
    """Chunk starts, the costs of each chunk, and the schedule simulated action by action."""

    starts: Starts
    costs: LayerCosts = field(repr=False)
    timeline: Timeline = field(repr=False)
    links: LinkTimes = field(repr=False)

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step: the schedule, and the work that stages do once per step."""
        rows = (self.of_stages(getattr(self.costs, name)) for name in ONCE)
        return self.timeline.makespan + max(float(self.links.once(*own)) for own in zip(*rows, strict=True))

    @cached_property
    def held(self) -> Numbers:
        """Peak bytes of a rank of each stage."""
        return tuple(a + b for a, b in zip(self.timeline.peaks(self.costs.memory), self.brief, strict=True))

    @cached_property
    def static(self) -> Numbers:
        """Bytes of each stage that are held all the time: weights, gradients and states."""
        return self.of_stages(self.costs.static)

    @cached_property
    def brief(self) -> Numbers:
        """Peak bytes of each stage for the layer that is recomputed; only one is recomputed at a time."""
        return self.of_stages(self.costs.brief, max)

    def of_stages(self, numbers: Numbers, of: Callable[[Iterator[float]], float] = sum) -> Numbers:
        """Return the numbers of each stage, combined from those of its chunks: by default their sum."""
        way = self.schedule.ways[0]
        stages = range(self.schedule.ranks)
        return tuple(of(x for x, at in zip(numbers, way, strict=True) if at == stage) for stage in stages)


def balance(
    layers: LayerCosts, stages: int, microbatches: int, memory_limit: float, links: LinkTimes, limit: float = inf
) -> Balanced | None:
    """Return the fastest chunks and schedule that fit into `memory_limit` bytes per rank.

    Return None if none fit, or if all take `limit` seconds or more. Several chunks per rank are used only if they take
    less time than one.
    """
    every = LayerSums(layers, links)
    if _least_seconds(layers, stages, microbatches) >= limit:
        return None
    one = _best_of_one_chunk(every, stages, microbatches, memory_limit, limit)
    several = _best_of_several_chunks(every, stages, microbatches, memory_limit)
    best = one if one is not None and (several is None or several.seconds >= one.seconds * (1 - SHORTER)) else several
    if best is None or best.seconds >= limit:
        return None
    costs = layers.chunks(best.starts)
    return Balanced(best.starts, costs, simulate_schedule(best.table, costs.times(links)), links)


def fits(layers: LayerCosts, stages: int, microbatches: int, memory_limit: float, links: LinkTimes) -> bool:
    """True if stages of one chunk fit into `memory_limit` bytes per rank."""
    tables = (runs.schedule for runs in one_chunk_tables(stages, microbatches))
    return any(next(starts_by_bound(layers, table, memory_limit, links), None) is not None for table in tables)


def _least_seconds(layers: LayerCosts, stages: int, microbatches: int) -> float:
    """Return a lower bound on the seconds of a step: the work of the mean rank, and its wait for the first microbatch.

    Before the first microbatch arrives at a rank, it passes at least one layer on each earlier rank.
    """
    come = layers.summed("forward")[:stages].sum() / stages
    return microbatches * sum(layers.whole) / stages + float(come)


class _Best(NamedTuple):
    """A table, the layers at which its chunks begin, and the seconds of a step."""

    seconds: float
    table: Schedule
    starts: Starts


def _best_of_one_chunk(
    layers: LayerSums, stages: int, microbatches: int, memory_limit: float, limit: float
) -> _Best | None:
    """Return the best table and starts with one chunk per rank; None if none fits.

    Candidates are simulated in the order of their lower bounds, until no other can be faster. Their number is limited
    by `RUN`; past it, the fastest of those that were simulated is returned.
    """
    steps = {
        runs.schedule.name: BatchedStepTime(layers, runs, memory_limit)
        for runs in one_chunk_tables(stages, microbatches)
    }
    ordered = (starts_by_bound(layers.costs, step.runs.schedule, memory_limit, layers.links) for step in steps.values())
    waiting = islice(merge(*ordered, key=itemgetter(0)), max(1, RUN // (stages * microbatches)))
    best: _Best | None = None
    while few := [*islice(waiting, TOGETHER)]:
        if few[0][0] >= min(best.seconds * (1 - SHORTER) if best is not None else limit, limit):
            break
        for found in _best_of_each_table(steps, few):
            if best is None or found.seconds < best.seconds * (1 - SHORTER):
                best = found
    return best


def _best_of_each_table(
    steps: Mapping[str, BatchedStepTime], candidates: Sequence[tuple[float, Schedule, Starts]]
) -> Iterator[_Best]:
    """Yield the fastest candidate of each table; the candidates of a table are simulated at once."""
    for name in dict.fromkeys(table.name for _, table, _ in candidates):
        (found,) = steps[name].best(starts for _, table, starts in candidates if table.name == name)
        yield _Best(found.seconds, steps[name].runs.schedule, found.starts)


def _best_of_several_chunks(layers: LayerSums, stages: int, microbatches: int, memory_limit: float) -> _Best | None:
    """Return the best table and starts with several chunks per rank; None if none fits.

    Starts are searched under one table after the other, the most promising table first.
    """
    tables = several_chunk_tables(stages, microbatches, layers.count)
    searches = [ChunkStarts(BatchedStepTime(layers, runs, memory_limit)) for runs in tables]
    left = RUN
    for search in sorted(searches, key=lambda s: s.best):
        while not search.is_done and left > 0:
            left -= search.go_on()
    best = min(searches, key=lambda s: s.best, default=None)
    if best is None or best.best.excess > 0:
        return None
    return _Best(best.best.seconds, best.table, best.best.starts)
