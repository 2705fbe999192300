"""Pipelines for a captured model that is a chain of repeated layers: stages, schedule, microbatches.

A microbatch of k p on r / p replicas of p stages is as large as a piece of k of a batch on r replicas: so operators are
cut as there, and what a stage takes is the sum of what its layers take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from ._balance import SCHEDULES, Balanced, balance
from ._chain import Chain, chain_of
from ._cuts import Cuts
from ._layer_costs import LayerCosts, layer_costs
from ._pipelining import Pipelining
from ._prices import Prices
from ._replicas import CLOSE, Replicas
from ._saving import NOTHING, Saving

MOST = max(SCHEDULES.values())
"""Stages times microbatches of a pipeline that is looked at."""
FILLING = 1 / 3
"""The part of a microbatch's work, F + B - W at the least, that no schedule of one chunk a stage hides as it fills."""


@dataclass(frozen=True)
class Piped:
    """A pipeline that was found: the cuts of operators, what each stage takes, and the seconds of a step."""

    cuts: Cuts
    saving: Saving
    how: Pipelining
    stages: Balanced
    dp: int
    tp: int
    synced: float

    @property
    def seconds(self) -> float:
        return self.stages.timeline.makespan + self.synced

    @property
    def nbytes(self) -> float:
        return max(self.stages.held)


@dataclass(frozen=True)
class _Candidate:
    """Stages, and pieces of the batch for each of them: stages times pieces are the microbatches."""

    at_least: float
    replicas: Replicas
    stages: int
    saving: Saving

    @property
    def microbatches(self) -> int:
        return self.stages * self.saving.accumulate


class Pipelines:
    """The pipelines of a model on so many ranks: `replicas` are those without one, for each number of shares."""

    def __init__(self, replicas: Sequence[Replicas], stages: int | None = None) -> None:
        self.replicas, self.stages = replicas, stages

    @cached_property
    def chain(self) -> Chain:
        first = self.replicas[0]
        return chain_of(first.of.program, first.problem(NOTHING).trains)

    @property
    def why_not(self) -> str:
        """Why there are no pipelines, where that is so."""
        asked = self.replicas[0].of
        return self.chain.why_not or (
            asked.evenly.why_not and f"pieces of the batch will not do: {asked.evenly.why_not}"
        )

    def best(self, replicas: Sequence[Replicas], limit: float = inf) -> Piped | None:
        """The fastest on these replicas that takes less than `limit` seconds and fits; those that may be go first."""
        best: Piped | None = None
        if self.why_not:
            return None
        for candidate in sorted(self._candidates(replicas), key=lambda c: c.at_least):
            if candidate.at_least * (1 + CLOSE) >= limit:
                break
            found = self._found(candidate)
            if found is not None and found.seconds * (1 + CLOSE) < limit:
                best, limit = found, found.seconds
        return best

    def _candidates(self, replicas: Sequence[Replicas]) -> Iterator[_Candidate]:
        for own in replicas:
            for stages in self._counts(own.dp):
                for saving in self._savings(own, stages):
                    if own.about.nbytes(saving) / stages <= own.of.room:
                        yield _Candidate(self._at_least(own, stages, saving), own, stages, saving)

    def _counts(self, replicas: int) -> list[int]:
        """How many stages replicas may become."""
        asked = range(2, replicas + 1) if self.stages is None else [self.stages]
        return [p for p in asked if p > 1 and replicas % p == 0 and p <= len(self.chain.layers)]

    def _savings(self, own: Replicas, stages: int) -> Iterator[Saving]:
        """Pieces, states that replicas share, layers that are made again."""
        for pieces in own.of.pieces(own.dp):
            if pieces * stages**2 <= MOST:
                for zero in range(2 if own.dp > stages else 1):
                    yield from (Saving(zero, again, pieces) for again in own.of.layers)

    def _at_least(self, own: Replicas, stages: int, saving: Saving) -> float:
        """Seconds of equal stages, filled as fast as can be."""
        work, plain = own.about.seconds(saving), own.about.plain.fastest
        filling = FILLING * work * (stages - 1) / (stages * saving.accumulate)
        prices = self._prices(own, stages, saving)
        return work + filling + prices.reduced(own.parameters(plain) / stages)

    def _prices(self, own: Replicas, stages: int, saving: Saving) -> Prices:
        return replace(own.prices, replicas=own.dp // stages, saving=saving)

    def _found(self, c: _Candidate) -> Piped | None:
        own, cluster = c.replicas, c.replicas.of.cluster
        problem, prices = own.problem(replace(c.saving, zero=0)), self._prices(own, c.stages, c.saving)
        cuts = problem.told(problem.fastest)
        across = c.stages * prices.replicas * own.tp > cluster.per_node

        def message(nbytes: float) -> float:
            return float(cluster.message(nbytes, across)) if nbytes else 0.0

        layers = layer_costs(cuts, prices, self.chain)
        stages = balance(layers, c.stages, c.microbatches, own.of.room, message)
        if stages is None:
            return None
        synced = max(_synced(stages.costs, prices, message))
        split = tuple(self.chain.layers[n] for n in stages.starts)
        how = Pipelining(split, stages.schedule.name, c.microbatches)
        return Piped(cuts, replace(c.saving, accumulate=1), how, stages, prices.replicas, own.tp, synced)


def _synced(costs: LayerCosts, prices: Prices, message: Callable[[float], float]) -> Iterator[float]:
    """Seconds of each stage for what is done once in a step: weights gathered, sent to other stages, gradients met."""
    for gathers, reduced, shared in zip(costs.gathers, costs.reduced, costs.shared, strict=True):
        yield gathers + prices.reduced(reduced) + 2 * message(shared)
