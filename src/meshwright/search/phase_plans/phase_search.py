"""Search for the layouts of training and of generation whose step takes the least time together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import Cluster, Habits
from meshwright.layout import JsonValue

from .._errors import SearchError, check_sizes
from ..plan_data.plan import Plan
from ..plan_data.progress_bar import OnProgress
from ..plan_data.units import parameters, size
from ..plan_data.units import seconds as seconds_text
from ..transformer_plans.candidates import candidates
from ..transformer_plans.choose import KEPT, PricedPlan, Row, choose, priced_plan, usable_memory
from ..transformer_plans.degrees import Plans, columns
from ..transformer_plans.peak_memory import hold
from ..transformer_plans.sizes import Transformer
from ..transformer_plans.software import MESHWRIGHT, Software
from .generation import GenerationSizes, SamplerLayout, check_model, sampler_layouts
from .generation_memory import generation_bytes, sampler_parts, training_state_bytes
from .generation_time import GenerationSeconds, generation_seconds
from .phase_plan import PhasePlan
from .weight_moves import STORED, WeightMove, weight_move

DOUBLINGS = 6
"""Most times that an error doubles the ranks or halves the prompts in search of a size that fits."""


def plan_phases(
    model: Transformer,
    cluster: Cluster,
    ranks: int,
    generation: GenerationSizes,
    precision: str = "bf16",
    software: Software = MESHWRIGHT,
    on_step: OnProgress | None = None,
    **given: JsonValue,
) -> tuple[PhasePlan, ...]:
    """Return plans for steps that generate, train on all rows and move the weights, on all ranks; fastest first.

    No two plans have the same layouts. Every pair of a plan of training and a sampler's layout is considered. `given`
    fixes fields of the plan of training, as in `choose`.

    Raises:
        SearchError: a size or a given field is not valid, the model has no price yet, or no pair fits. The message
            names the nearest size that fits.
    """
    check_model(model)
    check_sizes("a plan", 1, ranks=ranks)
    pairs = _Pairs(model, cluster, ranks, generation, software)
    try:
        found = choose(
            model,
            cluster,
            ranks,
            generation.rows,
            generation.positions,
            precision,
            software,
            on_step=on_step,
            beside=pairs.beside,
            **given,
        )
    except SearchError as error:
        smallest = pairs.smallest(precision, given)
        if smallest is None:
            raise
        raise _nothing_fits(pairs, smallest, precision, given) from error
    best: dict[tuple[int, ...], PhasePlan] = {}
    plans = [plan for priced in (found.best, *found.next) for plan in pairs.fitting(priced)]
    for plan in sorted(plans, key=lambda plan: plan.seconds):
        best.setdefault(plan.layouts, plan)
    return tuple(best.values())[:KEPT]


@dataclass(frozen=True)
class _Pairs:
    """The costs of every sampler's layout beside plans of training."""

    model: Transformer
    cluster: Cluster
    ranks: int
    generation: GenerationSizes
    software: Software

    @cached_property
    def layouts(self) -> tuple[SamplerLayout, ...]:
        return tuple(sampler_layouts(self.model, self.ranks, self.cluster.per_node, self.generation))

    @cached_property
    def generated(self) -> Mapping[SamplerLayout, GenerationSeconds]:
        return {
            layout: generation_seconds(self.model, layout, self.generation, self.cluster, self.software)
            for layout in self.layouts
        }

    def beside(self, plans: Plans) -> tuple[Row, Row]:
        """Return the seconds and bytes of the fastest layout that fits beside each plan, or else of the smallest."""
        costs = [self._costs(plans, layout) for layout in self.layouts]
        seconds, nbytes = (np.stack(rows) for rows in zip(*costs, strict=True))
        nbytes = nbytes + training_state_bytes(self.model, plans, self.software)
        fast = np.where(nbytes <= usable_memory(self.cluster), seconds, np.inf)
        best = np.where(np.isfinite(fast).any(0), fast.argmin(0), nbytes.argmin(0))[np.newaxis]
        return np.take_along_axis(seconds, best, 0)[0], np.take_along_axis(nbytes, best, 0)[0]

    def _costs(self, plans: Plans, layout: SamplerLayout) -> tuple[Row, Row]:
        """Return the seconds of generation and of the move of weights, and the bytes beside the states of training."""
        moves, at = self._moves(plans, layout)
        received, spent = (np.array(x)[at] for x in ([m.received for m in moves], [m.seconds for m in moves]))
        parts = sampler_parts(self.model, plans, layout, self.generation, received, self.software)
        nbytes = np.sum([np.broadcast_to(x, received.shape) for x in parts.values()], axis=0)
        return spent + self.generated[layout].total, nbytes

    def _moves(self, plans: Plans, layout: SamplerLayout) -> tuple[list[WeightMove], NDArray[np.intp]]:
        """Return the different moves of weights, and the index of that of each plan; waves change no move."""
        layout = replace(layout, waves=1)
        names = "dp", "tp", "pp", "cp", "chunks"
        stored = np.where(plans.zero >= STORED, STORED, 0)
        degrees = np.stack([*(getattr(plans, name) for name in names), stored]).astype(int)
        distinct, at = np.unique(degrees, axis=1, return_inverse=True)
        moves: list[WeightMove] = []
        for column in distinct.T:
            plan = Plan(**dict(zip((*names, "zero"), map(int, column), strict=True)), schedule=plans.schedule)
            moves.append(weight_move(self.model, plan, layout, self.cluster, self.software))
        return moves, np.ravel(at)

    def fitting(self, priced: PricedPlan) -> Iterator[PhasePlan]:
        """Yield the plans of both phases that fit: for each size of a replica, the number of waves with the least time.

        The seconds of training are those of the search.
        """
        further = float(self.beside(columns([priced.plan]))[0][0])
        by_size: dict[int, list[PhasePlan]] = {}
        for layout in self.layouts:
            found = self._phase_plan(priced.plan, priced.seconds - further, layout)
            if found.nbytes <= found.memory_limit:
                by_size.setdefault(layout.tp, []).append(found)
        yield from (min(plans, key=lambda plan: plan.seconds) for plans in by_size.values())

    def _phase_plan(self, plan: Plan, seconds: float, layout: SamplerLayout) -> PhasePlan:
        move = weight_move(self.model, plan, replace(layout, waves=1), self.cluster, self.software)
        held = generation_bytes(self.model, plan, layout, self.generation, move.received, self.software)
        return PhasePlan(
            plan,
            layout,
            self.generation,
            seconds,
            self.generated[layout],
            move,
            {name: float(x) for name, x in hold(self.model, plan, self.software).parts.items()},
            {name: float(x) for name, x in held.items()},
            usable_memory(self.cluster),
            tuple(_assumptions(self.software)),
        )

    def smallest(self, precision: str, given: Mapping[str, JsonValue]) -> PricedPlan | None:
        """Return the plan of training with the fewest bytes in both phases; None if there is no plan."""
        rows, length, found = self.generation.rows, self.generation.positions, list[PricedPlan]()
        for plans in candidates(self.model, self.ranks, rows, length, precision, self.cluster.per_node, given):
            seconds, beside = self.beside(plans)
            nbytes = np.maximum(np.asarray(hold(self.model, plans, self.software).nbytes), beside)
            found.append(priced_plan(plans, int(nbytes.argmin()), seconds, nbytes))
        return min(found, key=lambda priced: priced.nbytes, default=None)


def _assumptions(software: Software) -> Iterator[str]:
    """Yield what the predictions assume."""
    parts, host = " and ".join(sorted(software.graphs)), seconds_text(Habits().host[0])
    starts = f"device graphs start {parts}" if parts else f"the host starts a layer in {host} or more"
    yield "both phases run on all ranks, one after the other; the weights move once in each step"
    yield "a step trains once on each row; rewards, a critic and a reference model take no time and no memory"
    yield "no row ends before its last new token; weights and cache have 16 bits"
    yield "the states of training stay while the model generates; the sampler's own weights are freed while it trains"
    yield f"each decode step reads the cache of all positions, and {starts}"
    yield f"each rank receives only what it lacks, with messages of at most {size(software.bucket)} at a time"


def _nothing_fits(pairs: _Pairs, smallest: PricedPlan, precision: str, given: Mapping[str, JsonValue]) -> SearchError:
    plan, nbytes = smallest.plan, smallest.nbytes
    limit, g = usable_memory(pairs.cluster), pairs.generation
    near = list(_nearest_sizes(pairs, precision, given))
    return SearchError(
        f"a plan with the phases train and generate for {parameters(pairs.model.parameters)} on {pairs.ranks:,} ranks, "
        f"{g.prompts:,} prompts x {g.samples:,} samples of {g.positions:,} tokens",
        f"the smallest plan needs {size(nbytes)} per rank, of {size(limit)}: {plan}",
        f"{size(nbytes - limit)} are missing on each rank",
        f"use {' or '.join(near)}" if near else "use devices with more memory, fewer samples or shorter sequences",
    )


def _nearest_sizes(pairs: _Pairs, precision: str, given: Mapping[str, JsonValue]) -> Iterator[str]:
    """Yield the nearest sizes that fit: more ranks by doubling, fewer prompts by halving."""
    g = pairs.generation
    more = [replace(pairs, ranks=pairs.ranks << n) for n in range(1, DOUBLINGS + 1)]
    fewer = [
        replace(pairs, generation=replace(g, prompts=g.prompts >> n)) for n in range(1, DOUBLINGS + 1) if g.prompts >> n
    ]
    for what, others in (("ranks", more), ("prompts", fewer)):
        found = next((p for p in others if _fits(p, precision, given)), None)
        if found is not None:
            yield f"{found.ranks:,} ranks" if what == "ranks" else f"{found.generation.prompts:,} prompts"


def _fits(pairs: _Pairs, precision: str, given: Mapping[str, JsonValue]) -> bool:
    smallest = pairs.smallest(precision, {"recompute": "full", "microbatch": 1, **given})
    return smallest is not None and smallest.nbytes <= usable_memory(pairs.cluster)
