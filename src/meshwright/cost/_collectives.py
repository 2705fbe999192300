"""Seconds of collectives: the fastest of the algorithms that communication libraries offer.

A ring passes pieces on, in one round for gathers and scatters and in two for all-reduces. Across nodes, a tree reduces
and broadcasts in a logarithmic number of hops. A switch that reduces (NVLS) receives every byte once; between nodes,
each rank then carries its part of its node's sum. A hop sends whole messages, or lines that carry their own flags
(LL128), which have less latency and less bandwidth. The constants are those of NCCL, where `Link` has them. `python -m
benchmarks collectives` compares the results with published measurements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.reshard import ROUNDS, CollectiveKind

from ._kernels import Numbers
from ._link import Link

SPREAD = 0.64
"""Fraction of a ring's bandwidth that an all-to-all inside a node reaches; its messages are small."""
LINES = 0.92
"""Fraction of a link's bandwidth that lines with flags reach: 120 of 128 bytes are data, less the cost of checks."""


@dataclass(frozen=True)
class Group:
    """Ranks of which `together` share a node; arrays have one element per group."""

    inside: Link
    outside: Link | None
    ranks: Numbers
    together: Numbers

    @cached_property
    def within(self) -> NDArray[np.bool_]:
        """True if no network is between the ranks."""
        return np.asarray((self.ranks <= self.together) | (self.outside is None))

    @cached_property
    def own(self) -> Numbers:
        """Number of ranks of the group on one node."""
        return np.asarray(self.ranks) if self.outside is None else np.minimum(self.ranks, self.together)

    @cached_property
    def nodes(self) -> Numbers:
        return np.where(self.within, 1.0, self.ranks / np.maximum(self.together, 1.0))

    @property
    def network(self) -> float:
        """Bytes per second from each rank to other nodes."""
        return np.inf if self.outside is None else self.outside.bandwidth * self.outside.reach

    @cached_property
    def bandwidth(self) -> Numbers:
        """Bytes per second of a ring."""
        inside, share = self.inside.among(self.own), np.maximum(1.0, self.together) * self.network
        return np.where(self.within, inside, np.minimum(inside, share))

    def seconds(self, kind: CollectiveKind, nbytes: Numbers, leaving: Numbers = 1.0) -> Numbers:
        """Return the seconds on tensors of `nbytes` (the whole tensor for gathers and scatters); 0 for one rank."""
        if kind == "all-to-all":
            found = self._all_to_all_seconds(nbytes, leaving)
        else:
            found = np.minimum.reduce([np.asarray(way) for way in self._algorithm_seconds(kind, nbytes)])
        return np.where(self.ranks > 1, found, 0.0)

    def _algorithm_seconds(self, kind: CollectiveKind, nbytes: Numbers) -> Iterator[Numbers]:
        rounds = ROUNDS[kind]
        moved = rounds * nbytes * (1 - 1 / np.maximum(self.ranks, 1.0)) / self.bandwidth
        for hops in (self._ring_hops(rounds), *([self._tree_hops()] if kind == "all-reduce" else [])):
            yield self.inside.start + self._hop_seconds(hops, self.inside.latency, self._latency) + moved
            if self.inside.lines is not None and (self.outside is None or self.outside.lines is not None):
                start, hop = self.inside.lines
                far = hop if self.outside is None or self.outside.lines is None else self.outside.lines[1]
                yield start + self._hop_seconds(hops, hop, far) + moved / LINES
        if kind == "all-reduce" and self.inside.switched:
            yield self._switched_seconds(nbytes)

    @property
    def _latency(self) -> float:
        return self.inside.latency if self.outside is None else self.outside.latency

    @staticmethod
    def _hop_seconds(hops: tuple[Numbers, Numbers], near: float, far: float) -> Numbers:
        return hops[0] * near + hops[1] * far

    def _ring_hops(self, rounds: int) -> tuple[Numbers, Numbers]:
        """Return the hops of a ring: inside nodes, and between nodes."""
        between = self.nodes - 1.0
        return rounds * (self.ranks - 1.0 - between), rounds * between

    def _tree_hops(self) -> tuple[Numbers, Numbers]:
        """Return the hops of a tree of nodes with a chain of ranks in each: inside nodes, and between nodes."""
        return 2 * (self.ranks / self.nodes - 1.0), 2 * np.log2(np.maximum(self.nodes, 1.0))

    def _switched_seconds(self, nbytes: Numbers) -> Numbers:
        """Return the seconds of an all-reduce by switches; infinite if a node has one rank."""
        rate = self.inside.switched * self.inside.bandwidth * (1 - 1 / np.maximum(self.own, 1.0))
        inside = nbytes / np.maximum(rate, 1.0)
        outside = 2 * (1 - 1 / self.nodes) * nbytes / (np.maximum(self.own, 1.0) * self.network)
        start = self.inside.switching + 2 * np.log2(np.maximum(self.nodes, 1.0)) * self._latency
        return np.where(self.own > 1, start + np.maximum(inside, outside), np.inf)

    def _all_to_all_seconds(self, nbytes: Numbers, part: Numbers) -> Numbers:
        """Return the seconds of an all-to-all; bytes that leave the node use the rank's own share of the network."""
        inside = self.inside.among(self.own) * SPREAD
        leaving = (1 - 1 / self.nodes) * part
        way = np.where(leaving > 0, np.minimum(inside, self.network / np.maximum(leaving, 1e-9)), inside)
        hop = np.where(self.within, self.inside.latency, self._latency)
        return self.inside.start + hop + nbytes * (1 - 1 / np.maximum(self.ranks, 1.0)) / way
