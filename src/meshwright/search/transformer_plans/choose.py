"""Search for the plan with the least predicted time among those that fit into memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import Cluster
from meshwright.layout import JsonValue
from meshwright.pipeline import ScheduleError

from .._errors import SearchError, check_sizes
from ..plan_data.plan import Plan
from ..plan_data.progress_bar import OnProgress
from ..plan_data.units import parameters
from .candidates import candidates, count_bundles
from .degrees import NUMBERS, Plans, columns
from .nearest_sizes import fitting_ranks, nearest_choices, nearest_sizes
from .peak_memory import hold
from .predict import predict
from .simulated_step import SimulationWork, simulate_step
from .sizes import Transformer
from .software import MESHWRIGHT, Software

Row = NDArray[np.float64]
"""One number per plan."""
USABLE = 0.94
"""Fraction of the addressable memory that a plan may take. Contexts and buffers of communicators take the rest.

Where both were published, `nvidia-smi` showed 5 GB of 85 more than the values in use.
"""
SHOWN_PARTS = 3
KEPT = 8
NEAR = 1.1
"""A schedule's best plan is simulated if its closed form takes at most so much longer than the best one."""
ALIKE = 0.03
"""Largest relative difference in time at which a simpler plan is named. Predictions are no more exact than that."""
PLAIN = frozenset({"1F1B", "Interleaved 1F1B"})
"""Schedules that most programs have."""
Beside = Callable[[Plans], tuple[Row, Row]]
"""Function from plans to the seconds of other work in each step, and to the bytes that a rank holds meanwhile."""
MORE = 2.0
"""Memory of the devices that plans beyond the memory need at most, relative to the devices of the cluster."""
SIMULATED = 2**17
"""Chunks times microbatches that a search simulates: counted, so that any machine finds the same plan."""


def usable_memory(cluster: Cluster) -> float:
    """Return the bytes of a device that a plan may take."""
    return cluster.device.available * USABLE


@dataclass(frozen=True)
class PricedPlan:
    """A plan with its predicted seconds per step and bytes on the fullest rank."""

    plan: Plan
    seconds: float
    nbytes: float

    def __str__(self) -> str:
        return f"{self.seconds:.3g} s, {self.nbytes / 1e9:.1f} GB: {self.plan}"


@dataclass(frozen=True)
class PlanChoice:
    """The best plan, the next ones, and the number of plans that were considered.

    `beyond` is the fastest plan that would fit into twice the memory, if it is faster than the best. `simpler` is the
    simplest of the simulated plans that take at most 3 % longer than the best, if it is simpler than the best.
    """

    best: PricedPlan
    next: tuple[PricedPlan, ...]
    considered: int
    fitting: int
    seconds: float
    beyond: PricedPlan | None = None
    simpler: PricedPlan | None = None


def choose(
    model: Transformer,
    cluster: Cluster,
    ranks: int,
    batch: int,
    sequence: int,
    precision: str = "bf16",
    software: Software = MESHWRIGHT,
    keep: int = KEPT,
    on_step: OnProgress | None = None,
    beside: Beside | None = None,
    **given: JsonValue,
) -> PlanChoice:
    """Return the fastest plan for `ranks` devices of a cluster; `given` fixes fields of the plan, as `tp=8`.

    `keep` is the number of plans that are returned. `on_step` is called with the progress. Of plans that take equally
    long, the one with the smaller tp * cp * pp comes first. Seconds and bytes include the work `beside` a step of
    training: seconds are added, and a plan fits if the larger of both memories does.

    Raises:
        SearchError: a size or a given field is not valid, or no plan fits. The message says what is missing.
    """
    begin = time.monotonic()
    check_sizes("a plan", 1, ranks=ranks, batch=batch, sequence=sequence)
    memory_limit = usable_memory(cluster)
    best: list[PricedPlan] = []
    others: list[PricedPlan] = []
    too_large: list[PricedPlan] = []
    considered = fitting = 0
    smallest: PricedPlan | None = None
    tell, bundles = on_step or (lambda done, of: None), count_bundles(given)
    for n, plans in enumerate(candidates(model, ranks, batch, sequence, precision, cluster.per_node, given)):
        tell(n, 2 * bundles + keep)
        seconds, nbytes = _costs(model, plans, cluster, software, beside)
        fits = nbytes <= memory_limit
        considered, fitting = considered + len(seconds), fitting + int(fits.sum())
        fast = np.where(fits, seconds, np.inf)
        others += _best_plans(plans, fast, nbytes, keep)
        for chunks in np.unique(plans.chunks):
            best += _best_plans(plans, np.where(plans.chunks == chunks, fast, np.inf), nbytes, 1)
        is_beyond = ~fits & (nbytes <= memory_limit * MORE)
        too_large += _best_plans(plans, np.where(is_beyond, seconds, np.inf), nbytes, 1)
        least = priced_plan(plans, int(np.argmin(nbytes)), seconds, nbytes)
        smallest = least if smallest is None or least.nbytes < smallest.nbytes else smallest
    simulated = _to_simulate(best, others, keep)
    found = _sorted_by_simulation(
        simulated, model, cluster, software, beside, lambda n: tell(bundles + n, bundles + len(simulated))
    )
    if not found:
        asked = (ranks, batch, sequence, precision)
        raise _no_plan_error(model, cluster, asked, memory_limit, smallest, given, software)
    beyond = _faster_plan_beyond(sorted(too_large, key=_sort_key)[:1], found[0], model, cluster, software, beside)
    simpler, spent = _simpler_plan(found), time.monotonic() - begin
    return PlanChoice(found[0], tuple(found[1:keep]), considered, fitting, spent, beyond, simpler)


def _costs(
    model: Transformer, plans: Plans, cluster: Cluster, software: Software, beside: Beside | None
) -> tuple[Row, Row]:
    """Return the seconds and bytes of each plan."""
    seconds = np.asarray(predict(model, plans, cluster, software).seconds)
    nbytes = np.asarray(hold(model, plans, software).nbytes)
    if beside is None:
        return seconds, nbytes
    further, held = beside(plans)
    return seconds + further, np.maximum(nbytes, held)


def _to_simulate(best: list[PricedPlan], others: list[PricedPlan], keep: int) -> list[PricedPlan]:
    """Return the plans to simulate, in the order of their closed forms.

    They are the `keep` best ones, and the best plan of every schedule, number of chunks and recomputation that is
    nearly as fast: closed forms of different schedules are not equally exact.
    """
    first = sorted(others, key=_sort_key)[:keep]
    limit = first[0].seconds * NEAR if first else 0.0
    return sorted([*first, *(p for p in best if p not in first and p.seconds <= limit)], key=_sort_key)


def _faster_plan_beyond(
    too_large: list[PricedPlan],
    best: PricedPlan,
    model: Transformer,
    cluster: Cluster,
    software: Software,
    beside: Beside | None,
) -> PricedPlan | None:
    """Return the fastest plan that does not fit, if it is faster than the best."""
    found = [p for p in too_large if p.seconds < best.seconds]
    found = _sorted_by_simulation(found, model, cluster, software, beside)
    return next((p for p in found if p.seconds < best.seconds), None)


def _simpler_plan(found: list[PricedPlan]) -> PricedPlan | None:
    """Return the simplest of the plans that take nearly as long as the first, or None if that is the first."""
    near = [p for p in found if p.seconds <= found[0].seconds * (1 + ALIKE)]
    simplest = min(near, key=lambda p: (_complexity(p.plan), p.seconds))
    return simplest if _complexity(simplest.plan) < _complexity(found[0].plan) else None


def _complexity(plan: Plan) -> int:
    """Return the number of techniques that a plan uses besides replicas."""
    several = (plan.tp > 1, plan.pp > 1, plan.cp > 1, plan.ep > 1, plan.chunks > 1)
    return sum(several) + (plan.schedule not in PLAIN) + (plan.recompute != "none") + (plan.zero > 1)


def _sort_key(priced: PricedPlan) -> tuple[float, int, float]:
    """Return the sort key of a plan: seconds to six digits, then tp * cp * pp, then bytes."""
    return float(f"{priced.seconds:.6g}"), priced.plan.tp * priced.plan.cp * priced.plan.pp, priced.nbytes


def _sorted_by_simulation(
    found: list[PricedPlan],
    model: Transformer,
    cluster: Cluster,
    software: Software,
    beside: Beside | None,
    tell: Callable[[int], None] = lambda n: None,
) -> list[PricedPlan]:
    """Return the plans in the order of their simulated seconds; plans whose schedule has no table are dropped.

    The cheapest simulations come first. Plans are also dropped if they exceed `SIMULATED` units of work, so that all
    that are returned are comparable.
    """
    work, told = SimulationWork(), list[PricedPlan]()
    for n, priced in enumerate(sorted(found, key=lambda p: SimulationWork().of(p.plan))):
        tell(n)
        if told and work.units + work.of(priced.plan) > SIMULATED:
            continue
        work.add(priced.plan)
        with suppress(ScheduleError):
            others = float(beside(columns([priced.plan]))[0][0]) if beside else 0.0
            told.append(replace(priced, seconds=simulate_step(model, priced.plan, cluster, software) + others))
    return sorted(told, key=_sort_key)


def _best_plans(plans: Plans, seconds: Row, nbytes: Row, keep: int) -> Iterator[PricedPlan]:
    for n in np.argsort(seconds, kind="stable")[:keep]:
        if np.isfinite(seconds[n]):
            yield priced_plan(plans, int(n), seconds, nbytes)


def priced_plan(plans: Plans, n: int, seconds: Row, nbytes: Row) -> PricedPlan:
    """Return plan `n` of a bundle with its costs."""
    numbers = {name: int(getattr(plans, name)[n]) for name in NUMBERS}
    divided = bool(numbers.pop("sequence_parallel"))
    plan = Plan(
        **numbers,
        sequence_parallel=divided,
        schedule=plans.schedule,
        recompute=plans.recompute,
        precision=plans.precision,
    )
    return PricedPlan(plan, float(seconds[n]), float(nbytes[n]))


def _no_plan_error(
    model: Transformer,
    cluster: Cluster,
    sizes: tuple[int, int, int, str],
    memory_limit: float,
    smallest: PricedPlan | None,
    given: Mapping[str, JsonValue],
    software: Software,
) -> SearchError:
    ranks, batch = sizes[:2]
    asked = f"a plan for {parameters(model.parameters)} on {ranks} ranks, {batch} sequences per step"
    decided = ", ".join(f"{name} = {value}" for name, value in given.items())
    asked = f"{asked}, with {decided}" if decided else asked
    if smallest is None:
        return _no_degrees_error(asked, model, cluster, sizes, given)
    more = fitting_ranks(model, cluster, *sizes, memory_limit, given, software)
    return SearchError(
        asked,
        f"the smallest plan needs {smallest.nbytes / 1e9:.1f} GB per rank, of {memory_limit / 1e9:.1f} GB: "
        f"{smallest.plan}; the largest parts are {_largest_parts(model, smallest.plan, software)}",
        f"{(smallest.nbytes - memory_limit) / 1e9:.1f} GB are missing on each rank",
        f"use {' or '.join(_ways_to_fit(model, smallest.plan, memory_limit, more))}",
    )


def _no_degrees_error(
    asked: str, model: Transformer, cluster: Cluster, sizes: tuple[int, int, int, str], given: Mapping[str, JsonValue]
) -> SearchError:
    ranks, batch, sequence, _ = sizes
    own = (model, ranks, batch, sequence, cluster.per_node, given)
    near, choices = str(nearest_sizes(*own)), sorted(nearest_choices(*own))
    ways = [f"use {near}"] if near else []
    ways += [f"fix {' or '.join(choices)}"] if choices else ["fix fewer choices"] if given else []
    experts = f"ep must divide {model.experts.count} experts" if model.experts else "ep is 1: there are no experts"
    return SearchError(
        asked,
        f"no degrees of parallelism fit{' these fixed choices' if given else ''}",
        f"dp must divide {batch} sequences, tp must divide {model.heads} heads and a node of {cluster.per_node}, "
        f"pp * chunks is at most {model.layers}, dp * tp * pp * cp is {ranks}, and {experts}",
        "; or ".join(ways) or "use another number of ranks",
    )


def _ways_to_fit(model: Transformer, smallest: Plan, memory_limit: float, more: int | None) -> Iterator[str]:
    """Yield what would make a plan fit. A shorter sequence helps only if the states fit, which do not depend on it."""
    yield f"{more:,} ranks" if more else "more ranks"
    yield "devices with more memory"
    parts = hold(model, smallest).parts
    if float(parts["parameters and gradients"] + parts["optimizer"]) < memory_limit:
        yield "a shorter sequence"


def _largest_parts(model: Transformer, plan: Plan, software: Software) -> str:
    """Return the largest parts of the bytes of a rank under a plan, as text."""
    parts = {name: float(nbytes) for name, nbytes in hold(model, plan, software).parts.items()}
    largest = sorted(parts.items(), key=lambda part: -part[1])[:SHOWN_PARTS]
    return ", ".join(f"{name} with {nbytes / 1e9:.1f} GB" for name, nbytes in largest)
