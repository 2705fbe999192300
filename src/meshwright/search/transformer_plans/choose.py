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
from .degrees import NUMBERS, Plans
from .peak_memory import hold
from .predict import predict
from .simulated_step import has_short_table, simulate_step
from .sizes import Transformer
from .software import MESHWRIGHT, Software

Row = NDArray[np.float64]
"""One number per plan."""
USABLE = 0.94
"""Fraction of a device's memory that a plan may take: libraries hold some, and allocators round up."""
SHOWN_PARTS = 3
KEPT = 8
REHEARSAL = 5.0
"""Seconds for the simulation of the tables of the best plans."""


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

    `beyond` is the fastest plan that does not fit into memory, if it is faster than the best.
    """

    best: PricedPlan
    next: tuple[PricedPlan, ...]
    considered: int
    fitting: int
    seconds: float
    beyond: PricedPlan | None = None


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
    **given: JsonValue,
) -> PlanChoice:
    """Return the fastest plan for `ranks` devices of a cluster; `given` fixes fields of the plan, as `tp=8`.

    `keep` is the number of plans that are returned. `on_step` is called with the progress. Of plans that take equally
    long, the one with the smaller tp * cp * pp comes first.

    Raises:
        SearchError: a size or a given field is not valid, or no plan fits. The message says what is missing.
    """
    begin = time.monotonic()
    check_sizes("a plan", ranks=ranks, batch=batch, sequence=sequence)
    memory_limit = cluster.device.memory * USABLE
    found: list[PricedPlan] = []
    too_large: list[PricedPlan] = []
    considered = fitting = 0
    smallest: PricedPlan | None = None
    tell, bundles = on_step or (lambda done, of: None), count_bundles(given)
    for n, plans in enumerate(candidates(model, ranks, batch, sequence, precision, cluster.per_node, given)):
        tell(n, bundles + keep)
        seconds = np.asarray(predict(model, plans, cluster, software).seconds)
        nbytes = np.asarray(hold(model, plans, software).nbytes)
        fits = nbytes <= memory_limit
        considered, fitting = considered + len(seconds), fitting + int(fits.sum())
        found += _best_plans(plans, np.where(fits, seconds, np.inf), nbytes, keep)
        too_large += _best_plans(plans, np.where(fits, np.inf, seconds), nbytes, 1)
        least = _priced_plan(plans, int(np.argmin(nbytes)), seconds, nbytes)
        smallest = least if smallest is None or least.nbytes < smallest.nbytes else smallest
    found.sort(key=_sort_key)
    found = _sorted_by_simulation(found[:keep], model, cluster, software, lambda n: tell(bundles + n, bundles + keep))
    if not found:
        raise _no_plan_error(model, ranks, batch, memory_limit, smallest, given, software)
    beyond = _faster_plan_beyond(sorted(too_large, key=_sort_key)[:1], found[0], model, cluster, software)
    return PlanChoice(found[0], tuple(found[1:]), considered, fitting, time.monotonic() - begin, beyond)


def _faster_plan_beyond(
    too_large: list[PricedPlan], best: PricedPlan, model: Transformer, cluster: Cluster, software: Software
) -> PricedPlan | None:
    """Return the fastest plan that does not fit, if it is faster than the best; a short table is simulated."""
    found = [p for p in too_large if p.seconds < best.seconds]
    if found and has_short_table(found[0].plan):
        found = _sorted_by_simulation(found, model, cluster, software)
    return next((p for p in found if p.seconds < best.seconds), None)


def _sort_key(priced: PricedPlan) -> tuple[float, int, float]:
    """Return the sort key of a plan: seconds to six digits, then tp * cp * pp, then bytes."""
    return float(f"{priced.seconds:.6g}"), priced.plan.tp * priced.plan.cp * priced.plan.pp, priced.nbytes


def _sorted_by_simulation(
    found: list[PricedPlan],
    model: Transformer,
    cluster: Cluster,
    software: Software,
    tell: Callable[[int], None] = lambda n: None,
) -> list[PricedPlan]:
    """Return the plans in the order of their simulated seconds; plans whose schedule has no table are dropped.

    Plans that are left after `REHEARSAL` seconds come last, with their predicted seconds.
    """
    until, told = time.monotonic() + REHEARSAL, list[PricedPlan]()
    for n, priced in enumerate(found):
        tell(n)
        if time.monotonic() > until:
            return sorted(told, key=_sort_key) + found[n:]
        with suppress(ScheduleError):
            told.append(replace(priced, seconds=simulate_step(model, priced.plan, cluster, software)))
    return sorted(told, key=_sort_key)


def _best_plans(plans: Plans, seconds: Row, nbytes: Row, keep: int) -> Iterator[PricedPlan]:
    for n in np.argsort(seconds, kind="stable")[:keep]:
        if np.isfinite(seconds[n]):
            yield _priced_plan(plans, int(n), seconds, nbytes)


def _priced_plan(plans: Plans, n: int, seconds: Row, nbytes: Row) -> PricedPlan:
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
    ranks: int,
    batch: int,
    memory_limit: float,
    smallest: PricedPlan | None,
    given: Mapping[str, JsonValue],
    software: Software,
) -> SearchError:
    asked = f"a plan for {parameters(model.parameters)} on {ranks} ranks, {batch} sequences per step"
    decided = ", ".join(f"{name} = {value}" for name, value in given.items())
    asked = f"{asked}, with {decided}" if decided else asked
    if smallest is None and decided:
        return SearchError(
            asked,
            "no degrees of parallelism fit these fixed choices",
            f"they must divide the ranks, {model.layers} layers, {model.heads} heads, {model.kv_heads} key heads, "
            f"{model.experts.count if model.experts else 'no'} experts and {batch} sequences",
            "fix fewer choices: the search finds the others",
        )
    if smallest is None:
        return SearchError(
            asked,
            "no degrees of parallelism fit",
            "no divisors of sequences, layers and heads have the number of ranks as their product",
            "use another number of ranks, or a batch size with more divisors",
        )
    return SearchError(
        asked,
        f"the smallest plan needs {smallest.nbytes / 1e9:.1f} GB per rank, of {memory_limit / 1e9:.1f} GB: "
        f"{smallest.plan}; the largest parts are {_largest_parts(model, smallest.plan, software)}",
        f"{(smallest.nbytes - memory_limit) / 1e9:.1f} GB are missing on each rank",
        "use more ranks, devices with more memory, a shorter sequence, or a lower precision",
    )


def _largest_parts(model: Transformer, plan: Plan, software: Software) -> str:
    """Return the largest parts of the bytes of a rank under a plan, as text."""
    parts = {name: float(nbytes) for name, nbytes in hold(model, plan, software).parts.items()}
    largest = sorted(parts.items(), key=lambda part: -part[1])[:SHOWN_PARTS]
    return ", ".join(f"{name} with {nbytes / 1e9:.1f} GB" for name, nbytes in largest)
