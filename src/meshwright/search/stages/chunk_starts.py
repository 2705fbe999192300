"""Search for the layers at which pipeline chunks begin, if ranks have several chunks each.

If there are few possible starts, all are simulated at once. Otherwise a local search begins with chunks of about equal
seconds. Each round simulates the starts that move one layer from a chunk to another, and keeps the best few, until no
new ones are kept.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from .batched_step_time import BatchedStepTime, LayerSums, RatedStarts
from .stage_starts import Starts

ALL = 2**13
"""Number of possible starts up to which all are simulated at once."""
KEPT, MANY = 8, 2**11
"""Number of starts that a round keeps, and the number of their neighbours after which no more are added."""
ALIKE = 2**9
"""Number of starts that are simulated in about the time of one."""


class ChunkStarts:
    """Search for the chunk starts of one table; `found` has the best starts so far, the best first."""

    def __init__(self, step: BatchedStepTime) -> None:
        self.step, self.table = step, step.runs.schedule
        layers, chunks = step.layers, self.table.chunks
        self.is_done = comb(layers.count - 1, chunks - 1) <= ALL
        every = combinations(range(1, layers.count), chunks - 1)
        self.found = step.best(every if self.is_done else [_even_starts(layers, chunks)], KEPT)

    @property
    def best(self) -> RatedStarts:
        return self.found[0]

    def go_on(self) -> int:
        """Simulate the starts that move one layer to another chunk; return the simulated chunks times microbatches."""
        before, near = self.found, self._neighbours()
        known = {one.starts for one in before}
        new = [one for one in self.step.best(near, 2 * KEPT) if one.starts not in known]
        self.found = sorted([*before, *new])[:KEPT]
        self.is_done = self.found == before
        return self.table.chunks * self.table.microbatches * (1 + len(near) // ALIKE)

    def _neighbours(self) -> NDArray[np.int_]:
        """Return the neighbours of the best starts, and those of the others until there are `MANY`."""
        near = [np.array([self.best.starts])]
        for one in self.found:
            if sum(map(len, near)) < MANY:
                near.append(_moved_starts(one.starts, self.step.layers.count))
        return np.unique(np.concatenate(near), axis=0)


def _even_starts(layers: LayerSums, chunks: int) -> Starts:
    """Return the starts of chunks of about equal seconds and at least one layer each."""
    sums = layers.costs.summed("whole")
    found: list[int] = []
    for n in range(1, chunks):
        nearest = int(np.abs(sums - sums[-1] * n / chunks).argmin())
        least = found[-1] + 1 if found else 1
        found.append(min(max(nearest, least), layers.count - (chunks - n)))
    return tuple(found)


def _moved_starts(starts: Starts, layers: int) -> NDArray[np.int_]:
    """Return the starts that move one layer from a chunk to another, as rows; the chunks between are shifted."""
    found = np.array(starts) + _shifts(len(starts))
    lengths = np.diff(found, prepend=0, append=layers, axis=1)
    return found[(lengths > 0).all(axis=1)]


@lru_cache(maxsize=64)
def _shifts(count: int) -> NDArray[np.int_]:
    """Return the shifts of consecutive starts, later or earlier by one, as rows."""
    place, pairs = np.arange(count), np.array([*combinations(range(count + 1), 2)])
    later = ((pairs[:, :1] <= place) & (place < pairs[:, 1:])).astype(int)
    return np.concatenate([later, -later])
