"""What a step takes by one table, for many places at once where chunks may begin."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from meshwright.pipeline import Runs, Times

from ._layer_costs import ONCE, LayerCosts, Links
from ._starts import Starts


@dataclass(frozen=True)
class Layers:
    """What layers take, summed up so that runs of them are differences."""

    costs: LayerCosts
    links: Links

    @cached_property
    def count(self) -> int:
        return len(self.costs.whole)

    @cached_property
    def sums(self) -> dict[str, Any]:
        names = "forward", "backward", "weight", "held", "static", *ONCE
        return {name: self.costs.summed(name) for name in names}

    @cached_property
    def came(self) -> Any:
        """Bytes that come to a chunk which begins at a layer."""
        return np.array([0.0, *self.costs.sent])

    @cached_property
    def hops(self) -> Any:
        """Seconds of a message to a chunk which begins at a layer."""
        return np.array([0.0, *map(self.links.message, self.costs.sent)])


class Found(NamedTuple):
    """Bytes that the fullest rank has too many, seconds of a step, and where its chunks begin."""

    excess: float
    seconds: float
    starts: Starts


@dataclass(frozen=True)
class AtOnce:
    """A table for layers of which a rank may hold so many bytes."""

    layers: Layers
    runs: Runs
    room: float

    def best(self, starts: Iterable[Starts], count: int = 1) -> list[Found]:
        """The best of these, the very best first."""
        rows = np.array([*starts], dtype=int)
        seconds, excess = self._takes(rows)
        order = np.lexsort((seconds, excess))[:count]
        return [Found(float(excess[n]), float(seconds[n]), tuple(map(int, rows[n]))) for n in order]

    def _takes(self, starts: Any) -> tuple[Any, Any]:
        """Seconds of a step, and the bytes that the fullest rank has too many, of each starts (rows)."""
        layers, cases = self.layers, len(starts)
        edges = np.column_stack([np.zeros(cases, int), starts, np.full(cases, layers.count)]).T
        begins, ends = edges[:-1], edges[1:]
        forward, backward, weight, held, static, *once = (x[ends] - x[begins] for x in layers.sums.values())
        hops: Any = (*layers.hops[begins[1:]], 0.0)
        seconds = self.runs.makespans(Times(tuple(forward), tuple(backward), tuple(weight), hops))
        seconds += np.max(layers.links.once(*map(self._of_ranks, once)), axis=0)
        brief = self._of_ranks(layers.costs.brief_between[begins, ends], np.max)
        nbytes = self.runs.peaks(held + layers.came[begins]) + self._of_ranks(static) + brief
        return seconds, np.maximum(nbytes.max(axis=0) - self.room, 0.0)

    def _of_ranks(self, numbers: Any, of: Callable[..., Any] = np.sum) -> Any:
        """What the chunks (rows) of each rank have together."""
        way = np.array(self.runs.schedule.ways[0])
        return np.array([of(numbers[way == rank], axis=0) for rank in range(self.runs.schedule.ranks)])
