"""A time that no schedule can beat: what a rank must compute, what it must wait for first, and what comes after it.

For each rank, its first backward cannot come before a microbatch went to the last chunk and back; before that the rank
runs forwards only, as many as its memory holds. Likewise at the end, and in between memory lets only so many
microbatches live at one time.
"""

from __future__ import annotations

from itertools import pairwise

from meshwright.pipeline import Action, Kind, Schedule

from ._problem import Problem


def lower_bound(problem: Problem) -> float:
    """Seconds that every schedule takes at least, by the objective of `problem`."""
    paths = _Paths(problem)
    return max(max(paths.of_rank(r)) for r in range(problem.ranks))


class _Paths:
    """Lengths of the ways of a microbatch through the chunks and back."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        times, way = problem.times, problem.way
        n = len(way)
        self.f = [times.of(Action(Kind.FORWARD, 0, c)) + times.overhead for c in range(n)]
        self.w = [times.of(Action(Kind.BACKWARD_WEIGHT, 0, c)) + times.overhead for c in range(n)]
        self.b = [times.of(Action(Kind.BACKWARD_INPUT, 0, c)) + times.overhead for c in range(n)]
        if not problem.split:
            self.b = [times.of(Action(Kind.BACKWARD, 0, c)) + times.overhead for c in range(n)]
            self.w = [0.0] * n
        hops = [times.message(a, a + 1) if way[a] != way[a + 1] else 0.0 for a, _ in pairwise(range(n))]
        self.head = [sum(self.f[:c]) + sum(hops[:c]) for c in range(n)]
        """Chunk → when its first forward can begin."""
        self.tail = [sum(self.b[:c]) + sum(hops[:c]) for c in range(n)]
        """Chunk → how long it takes from the end of its B until the microbatch is back at the first chunk."""
        turn = self.head[-1] + self.f[-1]
        self.back = [turn + sum(self.b[c + 1 :]) + sum(hops[c:]) for c in range(n)]
        """Chunk → when its first backward can begin."""

    def of_rank(self, rank: int) -> list[float]:
        """Bounds that follow from what one rank does."""
        p, own = self.problem, [c for c, r in enumerate(self.problem.way) if r == rank]
        first, last = own[0], own[-1]
        work = p.microbatches * sum(self.f[c] + self.b[c] + self.w[c] for c in own)
        start = self.head[first] if p.objective == "makespan" else 0.0
        end = 0.0 if p.split or p.objective == "span" else self.tail[first]
        until_back = self.back[last] - self.head[first]
        ahead = min(self._forwards(rank, own), until_back)
        return [start + work + end, start + until_back + work - ahead + end, start + self._lives(rank, own) + end]

    def _forwards(self, rank: int, own: list[int]) -> float:
        """The most seconds of forwards that fit into the rank's memory before its first backward."""
        p, limit = self.problem, self.problem.limits[rank]
        if limit == float("inf"):
            return p.microbatches * sum(self.f[c] for c in own)
        held = {c: _held(p, c) for c in own}
        best, left = 0.0, limit
        for c in sorted(own, key=lambda c: held[c] / (self.f[c] or 1e-12)):
            n = min(p.microbatches, int(left / held[c] + 1e-9)) if held[c] > 0 else p.microbatches
            best, left = best + n * self.f[c], left - n * held[c]
        return best if len(own) == 1 else max(best, limit * max(self.f[c] / held[c] for c in own))

    def _lives(self, rank: int, own: list[int]) -> float:
        """How long it takes when only so many microbatches live at one time on the rank (one chunk per rank)."""
        p, c = self.problem, own[0]
        if len(own) != 1 or p.limits[rank] == float("inf") or not (held := _held(p, c)):
            return 0.0
        at_once = int(p.limits[rank] / held + 1e-9)
        kept = held + p.memory.change(_shape(p), Action(Kind.BACKWARD_INPUT, 0, c)) if p.split else 0.0
        life = self.back[c] - self.head[c] + self.b[c] + (self.w[c] if kept >= held else 0.0)
        if at_once < 1:
            return float("inf")
        rounds = (p.microbatches - 1) // at_once
        return rounds * life + self.back[c] - self.head[c] + self.b[c] + self.w[c]


def _shape(problem: Problem) -> Schedule:
    return Schedule("", (problem.way,), problem.microbatches, ((),) * problem.ranks)


def _held(problem: Problem, chunk: int) -> float:
    return problem.memory.change(_shape(problem), Action(Kind.FORWARD, 0, chunk))
