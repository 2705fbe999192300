"""Search for pipelines of a captured model that is a chain of repeated layers: stages, schedule, microbatches.

With p stages on r / p replicas, one of k p microbatches is as large as one of k pieces of a batch on r replicas. So
operators are cut as they are for these pieces, and the costs of a chunk are the sums of the costs of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from meshwright.cost import Numbers

from ..plan_data.units import size_rounded_up
from ..sharding.conversion_prices import Prices
from ..sharding.memory_saving import MemorySaving
from ..sharding.sharding_search import Shardings
from ..stages.balance import Balanced, balance, fits
from ..stages.layer_chain import Chain, chain_of
from ..stages.layer_costs import LinkTimes, layer_costs
from ..stages.schedule_tables import SCHEDULES, most_chunks
from .pipeline_plan import Pipelining
from .replicas import CLOSE, Replicas

MOST = max(SCHEDULES.values())
"""Upper bound on stages times microbatches of a pipeline in the search."""
FILLING = 1 / 3
"""Fraction of a microbatch's work, at least F + B - W, that no schedule hides while it fills; more chunks reduce it."""


@dataclass(frozen=True)
class FoundPipeline:
    """A pipeline of the search: the cuts of operators, the costs of each chunk, and the seconds of a step."""

    cuts: Shardings
    saving: MemorySaving
    how: Pipelining
    stages: Balanced
    dp: int
    tp: int

    @property
    def seconds(self) -> float:
        return self.stages.seconds

    @property
    def nbytes(self) -> float:
        return max(self.stages.held)


@dataclass(frozen=True)
class _Candidate:
    """A number of stages, and of pieces of the batch for each of them; their product is the number of microbatches."""

    at_least: float
    replicas: Replicas
    stages: int
    saving: MemorySaving

    @property
    def microbatches(self) -> int:
        return self.stages * self.saving.accumulate


class Pipelines:
    """Pipelines of a model on a number of ranks.

    `replicas` are the divisions without a pipeline, one for each number of ranks that share a replica.
    """

    def __init__(self, replicas: Sequence[Replicas], stages: int | None = None) -> None:
        self.replicas, self.stages = replicas, stages

    @cached_property
    def chain(self) -> Chain:
        first = self.replicas[0]
        return chain_of(first.of.program, first.of.program.trained)

    @property
    def why_not(self) -> str:
        """Reason why the model has no pipelines, or an empty text."""
        asked = self.replicas[0].of
        return self.chain.why_not or (asked.evenly.why_not and f"the batch cannot be split: {asked.evenly.why_not}")

    def why_none(self) -> str:
        """Return the first condition that no pipeline with the requested stages meets, with its numbers."""
        return next(self._unmet_conditions(self.stages or 2))

    def _unmet_conditions(self, stages: int) -> Iterator[str]:
        layers, replicas = len(self.chain.layers), [own.dp for own in self.replicas]
        if self.why_not:
            yield self.why_not
        if stages > layers:
            yield f"each stage needs a layer, and the model has {layers} repeated layers"
        if all(number % stages for number in replicas):
            yield f"{stages} divides none of the possible numbers of replicas ({', '.join(map(str, replicas))})"
        smallest = self._smallest_stages(stages)
        if not smallest:
            yield f"a schedule of {stages} stages has more than {MOST} microbatches on its ranks together"
        least, limit = min(smallest, default=0.0), self.replicas[0].of.memory_limit
        yield (
            f"no division of the layers fits: equal stages need at least {size_rounded_up(least)} of "
            f"{size_rounded_up(limit)} per rank"
        )

    def _smallest_stages(self, stages: int) -> list[float]:
        """Return the bytes per rank of equal stages, for each number of replicas and each memory-saving option."""
        divided = [own for own in self.replicas if own.dp % stages == 0]
        return [own.about.nbytes(saving) / stages for own in divided for saving in self._savings(own, stages)]

    def best(self, replicas: Sequence[Replicas], limit: float = inf) -> FoundPipeline | None:
        """Return the fastest pipeline on these replicas that fits and takes less than `limit` seconds, or None.

        Candidates are tried in the order of their estimated seconds.
        """
        best: FoundPipeline | None = None
        if self.why_not:
            return None
        for candidate in sorted(self._candidates(replicas), key=lambda c: c.at_least):
            if candidate.at_least * (1 + CLOSE) >= limit:
                break
            found = self._found(candidate, limit / (1 + CLOSE))
            if found is not None:
                best, limit = found, found.seconds
        return best

    def _candidates(self, replicas: Sequence[Replicas]) -> Iterator[_Candidate]:
        for own in replicas:
            for stages in self._counts(own.dp):
                for saving in self._savings(own, stages):
                    if own.about.nbytes(saving) / stages <= own.of.memory_limit:
                        yield _Candidate(self._at_least(own, stages, saving), own, stages, saving)

    def _counts(self, replicas: int) -> list[int]:
        """Return the numbers of stages into which replicas can be combined."""
        asked = range(2, replicas + 1) if self.stages is None else [self.stages]
        return [p for p in asked if p > 1 and replicas % p == 0 and p <= len(self.chain.layers)]

    def _savings(self, own: Replicas, stages: int) -> Iterator[MemorySaving]:
        """Yield memory-saving options: pieces, states that replicas share, recomputed layers."""
        for pieces in own.of.pieces(own.dp):
            if pieces * stages**2 <= MOST:
                for zero in range(2 if own.dp > stages else 1):
                    yield from (MemorySaving(zero, again, pieces) for again in own.of.layers)

    def _at_least(self, own: Replicas, stages: int, saving: MemorySaving) -> float:
        """Return the estimated seconds of equal stages that are filled as fast as possible."""
        work = own.about.seconds(saving)
        chunks = most_chunks(stages, stages * saving.accumulate, len(self.chain.layers))
        filling = FILLING * work * (stages - 1) / (stages * saving.accumulate * chunks)
        prices = self._prices(own, stages, saving)
        return work + filling + float(prices.reduced(own.fastest_parameters / stages))

    def _prices(self, own: Replicas, stages: int, saving: MemorySaving) -> Prices:
        return replace(own.prices, replicas=own.dp // stages, saving=saving)

    def _found(self, c: _Candidate, limit: float) -> FoundPipeline | None:
        """Return the fastest pipeline of a candidate that takes less than `limit` seconds, or None.

        A price of bytes makes cuts take as little memory as they must; a stage holds as many microbatches as there are
        stages. The result is the fastest of all that were tried, because cuts that take less memory may allow a faster
        table.
        """
        own, cluster, prices = c.replicas, c.replicas.of.cluster, self._prices(c.replicas, c.stages, c.saving)
        across = c.stages * prices.replicas * own.tp > cluster.per_node

        def message(nbytes: Numbers) -> Numbers:
            return np.where(nbytes > 0, cluster.message(nbytes, across), 0.0)

        links = LinkTimes(message, prices.reduced)

        found: list[tuple[Shardings, Balanced]] = []

        def goes(cuts: Shardings) -> Shardings | None:
            """Return the cuts if they fit, or None; record stages that are faster than all before."""
            shape = (
                layer_costs(problem.with_conversions(cuts), prices, self.chain),
                c.stages,
                c.microbatches,
                own.of.memory_limit,
                links,
            )
            stages = balance(*shape, found[-1][1].seconds if found else limit)
            found.extend([] if stages is None else [(cuts, stages)])
            return cuts if stages is not None or fits(*shape) else None

        problem = own.problem(replace(c.saving, zero=0)).holding(replace(prices, alive=float(c.stages)))
        problem.best_of(goes)
        if not found:
            return None
        cuts, stages = problem.with_conversions(found[-1][0]), found[-1][1]
        split = tuple(self.chain.layers[n] for n in stages.starts)
        way = stages.schedule.ways[0] if len(split) >= c.stages else ()
        how = Pipelining(split, stages.schedule.name, c.microbatches, way)
        return FoundPipeline(cuts, replace(c.saving, accumulate=1), how, stages, prices.replicas, own.tp)
