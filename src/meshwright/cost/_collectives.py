"""How long collectives take: the fastest of the ways that libraries have for them.

A ring passes pieces on, one round for gathers and scatters and two for all-reduces. Over nodes a tree adds up and hands
down in a logarithm of hops. A switch that adds up (NVLS) receives every byte once, and between nodes each rank carries
its part of what its node has added up. Hops go with whole messages, or with lines that carry their own flags (LL128):
fewer microseconds, and less of the bandwidth. Constants of NCCL, where `Link` has them; `python -m benchmarks
collectives` holds all of it beside published measurements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ._kernels import Numbers
from ._link import Link

Meeting = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]
ROUNDS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
SPREAD = 0.64
"""What an all-to-all inside a node reaches of what a ring does: its messages are small."""
LINES = 0.92
"""What lines with flags reach of a link's bandwidth: 120 of 128 bytes are data, less what checking costs."""


@dataclass(frozen=True)
class Group:
    """Ranks of which `together` share a node; one element per group that is priced."""

    inside: Link
    outside: Link | None
    ranks: Numbers
    together: Numbers

    @cached_property
    def within(self) -> NDArray[np.bool_]:
        """Whether no network is between them."""
        return np.asarray(np.less_equal(self.ranks, self.together) | (self.outside is None))

    @cached_property
    def own(self) -> Numbers:
        """How many of them a node has."""
        return np.asarray(self.ranks) if self.outside is None else np.minimum(self.ranks, self.together)

    @cached_property
    def nodes(self) -> Numbers:
        return np.where(self.within, 1.0, np.divide(self.ranks, np.maximum(self.together, 1.0)))

    @property
    def network(self) -> float:
        """Bytes per second of each rank to other nodes."""
        return np.inf if self.outside is None else self.outside.bandwidth * self.outside.reach

    @cached_property
    def bandwidth(self) -> Numbers:
        """Bytes per second of a ring."""
        inside, share = self.inside.among(self.own), np.maximum(1.0, self.together) * self.network
        return np.where(self.within, inside, np.minimum(inside, share))

    def seconds(self, kind: Meeting, nbytes: Numbers, leaving: Numbers = 1.0) -> Numbers:
        """Seconds on tensors of `nbytes` (whole for gathers and scatters); none for one rank."""
        if kind == "all-to-all":
            found = self._exchange(nbytes, leaving)
        else:
            found = np.minimum.reduce([np.asarray(way) for way in self._ways(kind, nbytes)])
        return np.where(np.greater(self.ranks, 1), found, 0.0)

    def _ways(self, kind: Meeting, nbytes: Numbers) -> Iterator[Numbers]:
        rounds = ROUNDS[kind]
        moved = rounds * np.asarray(nbytes) * (1 - 1 / np.maximum(self.ranks, 1.0)) / self.bandwidth
        for hops in (self._around(rounds), *([self._up_and_down()] if kind == "all-reduce" else [])):
            yield self.inside.start + self._waits(hops, self.inside.latency, self._latency) + moved
            if self.inside.lines is not None and (self.outside is None or self.outside.lines is not None):
                start, hop = self.inside.lines
                far = hop if self.outside is None or self.outside.lines is None else self.outside.lines[1]
                yield start + self._waits(hops, hop, far) + moved / LINES
        if kind == "all-reduce" and self.inside.switched:
            yield self._switched(nbytes)

    @property
    def _latency(self) -> float:
        return self.inside.latency if self.outside is None else self.outside.latency

    @staticmethod
    def _waits(hops: tuple[Numbers, Numbers], near: float, far: float) -> Numbers:
        return np.multiply(hops[0], near) + np.multiply(hops[1], far)

    def _around(self, rounds: int) -> tuple[Numbers, Numbers]:
        """Hops of a ring inside nodes, and between them."""
        between = self.nodes - 1.0
        return rounds * (np.asarray(self.ranks) - 1.0 - between), rounds * between

    def _up_and_down(self) -> tuple[Numbers, Numbers]:
        """Those of a tree of nodes, in which ranks are chains."""
        return 2 * (np.asarray(self.ranks) / self.nodes - 1.0), 2 * np.log2(np.maximum(self.nodes, 1.0))

    def _switched(self, nbytes: Numbers) -> Numbers:
        """An all-reduce that switches add up; none where a node has one rank."""
        rate = self.inside.switched * self.inside.bandwidth * (1 - 1 / np.maximum(self.own, 1.0))
        inside = np.divide(nbytes, np.maximum(rate, 1.0))
        outside = 2 * (1 - 1 / self.nodes) * np.asarray(nbytes) / (np.maximum(self.own, 1.0) * self.network)
        start = self.inside.switching + 2 * np.log2(np.maximum(self.nodes, 1.0)) * self._latency
        return np.where(np.greater(self.own, 1), start + np.maximum(inside, outside), np.inf)

    def _exchange(self, nbytes: Numbers, part: Numbers) -> Numbers:
        """Everyone to everyone: what leaves the node goes through the rank's own share of the network."""
        inside = self.inside.among(self.own) * SPREAD
        leaving = (1 - 1 / self.nodes) * part
        way = np.where(np.greater(leaving, 0), np.minimum(inside, self.network / np.maximum(leaving, 1e-9)), inside)
        hop = np.where(self.within, self.inside.latency, self._latency)
        return self.inside.start + hop + np.asarray(nbytes) * (1 - 1 / np.maximum(self.ranks, 1.0)) / way
