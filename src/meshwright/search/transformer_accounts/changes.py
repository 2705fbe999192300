"""Changes of a cluster, of a program or of the batch, and the time that a token then takes with the same degrees.

Both times are closed forms. A plan of a search is compared by simulated times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshwright.cost import Cluster, Link

from ..plan_data.account import Change
from ..plan_data.plan import Plan, differences
from ..plan_data.units import size
from ..transformer_plans.choose import PlanChoice
from ..transformer_plans.peak_memory import hold
from ..transformer_plans.predict import predict
from ..transformer_plans.simulated_step import simulate_step
from ..transformer_plans.sizes import Transformer
from ..transformer_plans.software import MESHWRIGHT, LayerPart, Software
from .fewer_ranks import fewer_ranks

LEAST = 0.005
"""Smallest saved share of the time of a token that is listed."""


def changes(
    model: Transformer,
    plan: Plan,
    cluster: Cluster,
    software: Software = MESHWRIGHT,
    choice: PlanChoice | None = None,
) -> tuple[Change, ...]:
    """Return the changes that save time, the one that saves most first, and then the fewer ranks that would do.

    `choice` adds faster plans of a search. Fewer ranks are compared with the best plan of a search only.
    """
    now = _token_seconds(model, plan, cluster, software)
    found = [
        Change(what, _token_seconds(model, then, there, program) / now)
        for what, then, there, program in _changed(model, plan, cluster, software)
    ]
    if choice is not None:
        found += _faster_plans(plan, choice, simulate_step(model, plan, cluster, software))
    saving = sorted((c for c in found if c.times <= 1 - LEAST), key=lambda c: c.times)
    is_best = choice is not None and choice.best.plan == plan
    return (*saving, *(fewer_ranks(model, plan, cluster, software) if is_best else ()))


def _faster_plans(plan: Plan, choice: PlanChoice, now: float) -> Iterator[Change]:
    """Yield the best plan of a search, or the faster one that needs more memory."""
    if choice.best.plan != plan:
        yield Change(f"the plan with {differences(plan, choice.best.plan)}", choice.best.seconds / now)
    elif choice.beyond is not None:
        other = choice.beyond
        changed = differences(plan, other.plan)
        yield Change(f"{size(other.nbytes)} of memory for each rank, and {changed}", other.seconds / now)


def _token_seconds(model: Transformer, plan: Plan, cluster: Cluster, software: Software) -> float:
    return float(np.asarray(predict(model, plan, cluster, software).seconds)) / (plan.batch * plan.sequence)


def _changed(
    model: Transformer, plan: Plan, cluster: Cluster, software: Software
) -> Iterator[tuple[str, Plan, Cluster, Software]]:
    """Yield a plan, a cluster and a program that differ in one thing, with its name."""
    yield "twice the batch", replace(plan, batch=2 * plan.batch), cluster, software
    if plan.recompute != "none":
        whole = replace(plan, recompute="none")
        more = _bytes(model, whole, software) - _bytes(model, plan, software)
        yield f"no recomputation, with {size(more)} more memory", whole, cluster, software
    device = replace(cluster.device, bandwidth=2 * cluster.device.bandwidth)
    yield "twice the memory bandwidth of the devices", plan, replace(cluster, device=device), software
    if plan.ranks > 1:
        yield (
            "twice the bandwidth of links inside a node",
            plan,
            replace(cluster, inside=_twice(cluster.inside)),
            software,
        )
    if plan.ranks > cluster.per_node and cluster.outside is not None:
        faster = replace(cluster, outside=_twice(cluster.outside))
        yield "twice the bandwidth of the network between nodes", plan, faster, software
    graphs = frozenset[LayerPart](("attention", "feed-forward" if model.experts is None else "router"))
    if not graphs <= software.graphs:
        program = replace(software, graphs=software.graphs | graphs)
        yield "device graphs that start the layers instead of the host", plan, cluster, program
    for what, program in _hidden(plan, software):
        yield what, plan, cluster, program


def _hidden(plan: Plan, software: Software) -> Iterator[tuple[str, Software]]:
    """Yield programs that hide one more kind of communication."""
    if plan.tp > 1:
        yield "sums of tensor parallelism hidden", replace(software, tensor=0.0)
    if plan.ep > 1:
        yield "exchanges of experts hidden", replace(software, exchange=0.0)
    if plan.dp * plan.cp > 1 and plan.zero != 3:
        yield "reductions of gradients hidden", replace(software, exposed=0.0)


def _twice(link: Link) -> Link:
    return replace(link, bandwidth=2 * link.bandwidth)


def _bytes(model: Transformer, plan: Plan, software: Software) -> float:
    return float(np.asarray(hold(model, plan, software).nbytes))
