"""Step times and memory by one schedule table, for many chunk starts at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.pipeline import BatchedSimulation, Times

from ..sharding.variable_elimination import Costs
from .layer_costs import ONCE, LayerCosts, LinkTimes
from .stage_starts import Starts


@dataclass(frozen=True)
class LayerSums:
    """Cumulative costs of layers, so that the cost of consecutive layers is a difference."""

    costs: LayerCosts
    links: LinkTimes

    @cached_property
    def count(self) -> int:
        return len(self.costs.whole)

    @cached_property
    def sums(self) -> dict[str, Costs]:
        names = "forward", "backward", "weight", "held", "static", *ONCE
        return {name: self.costs.summed(name) for name in names}

    @cached_property
    def came(self) -> Costs:
        """Bytes that are sent to a chunk, by the layer at which the chunk begins."""
        return np.array([0.0, *self.costs.sent])

    @cached_property
    def hops(self) -> Costs:
        """Seconds of the message to a chunk, by the layer at which the chunk begins."""
        return np.array([0.0, *map(self.links.message, self.costs.sent)])


class RatedStarts(NamedTuple):
    """Chunk starts, with the bytes above the limit on the fullest rank and the seconds of a step."""

    excess: float
    seconds: float
    starts: Starts


@dataclass(frozen=True)
class BatchedStepTime:
    """One schedule table, for layers and a limit of `memory_limit` bytes per rank."""

    layers: LayerSums
    runs: BatchedSimulation
    memory_limit: float

    def best(self, starts: Iterable[Starts], count: int = 1) -> list[RatedStarts]:
        """Return the best `count` of these starts, best first: by the bytes above the limit, then by seconds."""
        rows = np.array([*starts], dtype=int)
        seconds, excess = self._seconds_and_excess(rows)
        order = np.lexsort((seconds, excess))[:count]
        return [RatedStarts(float(excess[n]), float(seconds[n]), tuple(map(int, rows[n]))) for n in order]

    def _seconds_and_excess(self, starts: NDArray[np.int_]) -> tuple[Costs, Costs]:
        """Return the seconds of a step and the bytes above the limit on the fullest rank, for each row of starts."""
        layers, cases = self.layers, len(starts)
        edges = np.column_stack([np.zeros(cases, int), starts, np.full(cases, layers.count)]).T
        begins, ends = edges[:-1], edges[1:]
        forward, backward, weight, held, static, *once = (x[ends] - x[begins] for x in layers.sums.values())
        hops: Any = (*layers.hops[begins[1:]], 0.0)
        seconds = self.runs.makespans(Times(tuple(forward), tuple(backward), tuple(weight), hops))
        seconds += np.max(layers.links.once(*map(self._of_ranks, once)), axis=0)
        brief = self._of_ranks(layers.costs.brief_between[begins, ends], np.max)
        nbytes = self.runs.peaks(held + layers.came[begins]) + self._of_ranks(static) + brief
        return seconds, np.maximum(nbytes.max(axis=0) - self.memory_limit, 0.0)

    def _of_ranks(self, numbers: Costs, of: Callable[..., Costs] = np.sum) -> Costs:
        """Return the numbers of each rank, combined from those of its chunks (rows)."""
        way = np.array(self.runs.schedule.ways[0])
        return np.array([of(numbers[way == rank], axis=0) for rank in range(self.runs.schedule.ranks)])
