"""Where the chunks of a pipeline begin whose ranks have several of them: no rank's part is a run of layers there.

Where the ways to begin are few, all are run at once. Else the best is looked for step by step, from chunks that are
about equal: of a few starts and of all that have one layer in another chunk, the best few are kept, until none are new.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from math import comb
from typing import Any

import numpy as np

from ._at_once import AtOnce, Found, Layers
from ._starts import Starts

ALL = 2**13
"""So many ways to begin are run at once."""
KEPT, MANY = 8, 2**11
"""So many of them are gone on from, and to how many."""
ALIKE = 2**9
"""So many take about as long at once as one."""


class ChunkStarts:
    """The best starts so far of the chunks of a table, in `found` from the best on."""

    def __init__(self, step: AtOnce) -> None:
        self.step, self.table = step, step.runs.schedule
        layers, chunks = step.layers, self.table.chunks
        self.is_done = comb(layers.count - 1, chunks - 1) <= ALL
        every = combinations(range(1, layers.count), chunks - 1)
        self.found = step.best(every if self.is_done else [_even(layers, chunks)], KEPT)

    @property
    def best(self) -> Found:
        return self.found[0]

    def go_on(self) -> int:
        """Looks at those that have one layer in another chunk; gives chunks times microbatches that were run."""
        before, near = self.found, self._near()
        known = {one.starts for one in before}
        new = [one for one in self.step.best(near, 2 * KEPT) if one.starts not in known]
        self.found = sorted([*before, *new])[:KEPT]
        self.is_done = self.found == before
        return self.table.chunks * self.table.microbatches * (1 + len(near) // ALIKE)

    def _near(self) -> Any:
        """Around the best of what was found, and around the others as far as these are few."""
        near = [np.array([self.best.starts])]
        for one in self.found:
            if sum(map(len, near)) < MANY:
                near.append(_around(one.starts, self.step.layers.count))
        return np.unique(np.concatenate(near), axis=0)


def _even(layers: Layers, chunks: int) -> Starts:
    """Chunks of about equal seconds, of a layer each at least."""
    sums = layers.costs.summed("whole")
    found: list[int] = []
    for n in range(1, chunks):
        nearest = int(np.abs(sums - sums[-1] * n / chunks).argmin())
        least = found[-1] + 1 if found else 1
        found.append(min(max(nearest, least), layers.count - (chunks - n)))
    return tuple(found)


def _around(starts: Starts, layers: int) -> Any:
    """One chunk gives a layer to another, those between are moved: a row for each."""
    found = np.array(starts) + _moves(len(starts))
    lengths = np.diff(found, prepend=0, append=layers, axis=1)
    return found[(lengths > 0).all(axis=1)]


@lru_cache(maxsize=64)
def _moves(count: int) -> Any:
    """Some of so many starts in a row, later or earlier by one."""
    place, pairs = np.arange(count), np.array([*combinations(range(count + 1), 2)])
    later = (pairs[:, :1] <= place) & (place < pairs[:, 1:])
    return np.concatenate([later, -1 * later])
