"""Lower bound on the time of any schedule: a rank's work, its wait before, and what comes after.

The first backward of a rank runs after a microbatch went to the last chunk and back. Before that, the rank runs only
forwards, as many as its memory holds. After the last backward of the rank, the microbatch still goes back to the first
chunk. Weight gradients can wait, except those whose memory the last forward needs. Memory also limits the number of
microbatches in flight.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, inf

from meshwright.pipeline import Action, ActionKind

from .problem import Problem

NOTHING = 1e-9
"""Tolerance for quotients of floats."""


def lower_bound(problem: Problem) -> float:
    """Return a lower bound on the objective of `problem`, in seconds; infinite if memory is too small."""
    paths = Paths(problem)
    return max(max(paths.of_rank(r)) for r in range(problem.ranks))


class Paths:
    """Lengths of the paths of a microbatch through the chunks and back.

    The overhead of an action is counted for forwards and for the first part of a backward only. A table may run both
    parts of a backward as one action.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        times, n = problem.times, len(problem.way)
        self.f = [times.of(Action(ActionKind.FORWARD, 0, c)) + times.overhead for c in range(n)]
        self.w = [times.of(Action(ActionKind.BACKWARD_WEIGHT, 0, c)) for c in range(n)]
        self.b = [times.of(Action(ActionKind.BACKWARD_INPUT, 0, c)) + times.overhead for c in range(n)]
        if not problem.split:
            self.b = [b + w for b, w in zip(self.b, self.w, strict=True)]
            self.w = [0.0] * n
        hops = _hops(problem)
        self.head = [sum(self.f[:c]) + sum(hops[:c]) for c in range(n)]
        """Chunk → start of its first forward; no schedule can run other work before it on this path."""
        self.tail = [sum(self.b[:c]) + sum(hops[:c]) for c in range(n)]
        """Chunk → seconds from the end of its B until the microbatch is back at the first chunk."""
        turn = self.head[-1] + self.f[-1]
        self.back = [turn + sum(self.b[c + 1 :]) + sum(hops[c:]) for c in range(n)]
        """Chunk → earliest start of its first backward."""

    def start(self, rank: int) -> float:
        """Return the time at which a rank begins, in every schedule."""
        return self.head[self.problem.way.index(rank)]

    def of_rank(self, rank: int) -> list[float]:
        """Return lower bounds that follow from the work of one rank."""
        p, own = self.problem, self.problem.chunks_of(rank)
        first, last = own[0], own[-1]
        until_back = self.back[last] - self.head[first]
        idle = max(0.0, until_back - self._forward_seconds(rank, own))
        back_and_forth = p.microbatches * sum(self.f[c] + self.b[c] for c in own)
        weights = p.microbatches * sum(self.w[c] for c in own)
        start, lives = self.head[first], self._seconds_by_lives(rank, own)
        own_start = start if p.objective == "span" else 0.0
        after = self.tail[first] + self.w[0]
        return [
            start + idle + back_and_forth + weights - own_start,
            start + lives + min(self.w[c] for c in own) - own_start,
            start + idle + back_and_forth + self._due_weight_seconds(rank, own) + after,
            start + lives + after,
        ]

    def _forward_seconds(self, rank: int, own: list[int]) -> float:
        """Return the most seconds of forwards that can fit into the rank's memory before its first backward."""
        p, left = self.problem, self.problem.microbatch_limits[rank]
        most = 0.0
        for c in sorted(own, key=lambda c: -self.f[c] / p.held(c) if p.held(c) else -inf):
            n = min(p.microbatches, left / p.held(c) + NOTHING) if p.held(c) else p.microbatches
            n = int(n) if len(own) == 1 else n
            most, left = most + n * self.f[c], left - n * p.held(c)
        return most

    def _due_weight_seconds(self, rank: int, own: list[int]) -> float:
        """Return the fewest seconds of weight gradients that must free memory for the rank's last forward."""
        p, m = self.problem, self.problem.microbatches
        kept = {c: min(p.kept(c), p.held(c)) for c in own}
        short = sum(m * p.held(c) - (m - 1) * (p.held(c) - kept[c]) for c in own) - p.microbatch_limits[rank]
        if not p.split or short <= 0:
            return 0.0
        if len(own) == 1:
            return ceil(short / kept[own[0]] - NOTHING) * self.w[own[0]] if kept[own[0]] else inf
        return short * min((self.w[c] / kept[c] for c in own if kept[c]), default=inf)

    def _seconds_by_lives(self, rank: int, own: list[int]) -> float:
        """Return a lower bound on the seconds until the last B, from the limit on microbatches in flight.

        Return 0 if the rank has several chunks or no limit of memory.
        """
        p, c = self.problem, own[0]
        if len(own) != 1 or p.microbatch_limits[rank] == inf or not p.held(c):
            return 0.0
        at_once = int(p.microbatch_limits[rank] / p.held(c) + NOTHING)
        if at_once < 1:
            return inf
        first = self.back[c] - self.head[c] + self.b[c]
        life = first + (self.w[c] if p.split and p.kept(c) >= p.held(c) else 0.0)
        rounds, more = divmod(p.microbatches - 1, at_once)
        return rounds * life + first + more * self.b[c]


def _hops(problem: Problem) -> list[float]:
    """Return the seconds of the message from each chunk to the next; 0 if both are on one rank."""
    ranks = enumerate(pairwise(problem.way))
    return [problem.times.message(c, c + 1) if here != there else 0.0 for c, (here, there) in ranks]
