"""Account of a plan for a model that is described by its sizes: time, memory, the bottleneck, and other plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from meshwright.cost import Cluster, Link
from meshwright.pipeline import Timeline, simulate_schedule

from ..plan_data.account import (
    Account,
    Communication,
    MemoryCurve,
    OtherPlan,
    Throughput,
    pipeline_memory_curve,
    slower_parts,
)
from ..plan_data.plan import Plan, differences
from ..plan_data.progress_bar import OnProgress
from ..plan_data.units import parameters
from ..transformer_plans.choose import PlanChoice, PricedPlan, usable_memory
from ..transformer_plans.communication import communications
from ..transformer_plans.degrees import microbatches
from ..transformer_plans.peak_memory import hold, hold_each
from ..transformer_plans.predict import flops_utilisation, predict, stages_of
from ..transformer_plans.simulated_step import has_picture, has_short_table, simulate_step, table_of, times_of
from ..transformer_plans.sizes import Transformer
from ..transformer_plans.software import MESHWRIGHT, Software
from ..transformer_plans.tensor_layouts import stage_parts, tensor_layouts
from .assumptions import assumptions
from .changes import changes
from .known_recipes import nearest_recipes

BILLION, HOUR = 1e9, 3600.0
OTHERS = "accumulation", "optimizer", "host"
PARTS = {
    "communication": "ranks wait for links",
    "bubble": "ranks of the pipeline wait for other ranks",
    "accumulation": "gradients of microbatches are added up",
    "optimizer": "parameters are updated",
    "host": "the host prepares the step",
}
"""Part of a step other than computation → what happens in it."""


def account(
    model: Transformer,
    plan: Plan,
    cluster: Cluster,
    choice: PlanChoice | None = None,
    software: Software = MESHWRIGHT,
    on_step: OnProgress | None = None,
) -> Account:
    """Return the account of a step under `plan`, compared with the plans of `choice`.

    `on_step` is called with (done, of).

    Raises:
        SearchError: as `predict`.
        ScheduleError: as `simulate_step`.
    """
    spent, nbytes = _spent(model, plan, cluster, software), float(hold(model, plan, software).nbytes)
    others = [p for p in (choice.best, *choice.next) if p.plan != plan] if choice else []
    told = tuple(_other_plans(model, plan, cluster, software, nbytes, others, on_step))
    rows, timeline = communications(model, plan, cluster, software), _timeline(model, plan, cluster, software)
    seconds = sum(spent.values())
    each = {
        s.name: {kind: float(x) for kind, x in parts.items()}
        for s, parts in zip(stage_parts(model, plan), hold_each(model, plan, software), strict=True)
    }
    return Account(
        what=f"a transformer of {parameters(model.parameters)}, {model.layers} layers",
        how=", ".join(f"{name} = {value}" for name, value in asdict(plan).items() if value != USUAL[name]),
        where=f"{plan.ranks} ranks of {cluster!r}",
        seconds=seconds,
        nbytes=nbytes,
        memory_limit=usable_memory(cluster),
        why=tuple(_why(plan, spent, rows, nbytes, cluster, choice)),
        spent=spent,
        held=each,
        laid=tuple(tensor_layouts(model, plan)),
        sent=rows,
        rivals=told,
        decided=asdict(plan),
        timeline=timeline,
        curves=tuple(_curves(timeline, each)) if timeline else (),
        throughput=throughput(model, plan, cluster, seconds),
        assumed=assumptions(model, plan, cluster, software),
        changes=changes(model, plan, cluster, software, choice),
        recipes=tuple(_recipes(model, plan, cluster, software)),
    )


def throughput(model: Transformer, plan: Plan, cluster: Cluster, seconds: float) -> Throughput:
    """Return the rates of a step that takes so many seconds."""
    tokens = plan.batch * plan.sequence / seconds
    hours = plan.ranks / tokens * BILLION / HOUR
    return Throughput(tokens, flops_utilisation(model, plan, cluster, seconds), hours)


USUAL = asdict(Plan())


def _spent(
    model: Transformer, plan: Plan, cluster: Cluster, software: Software, by_table: bool = True
) -> dict[str, float]:
    """Return the seconds of a step by part, averaged over the ranks.

    Communication is the time that a step takes longer than on free links. Without tables, closed forms are used.
    """

    def step(on: Cluster) -> float:
        if by_table:
            return simulate_step(model, plan, on, software)
        return float(predict(model, plan, on, software).seconds)

    free = replace(cluster, inside=_free(cluster.inside), outside=None)
    whole, alone = step(cluster), step(free)
    parts = {name: float(x) for name, x in predict(model, plan, free, software).parts.items()}
    others = {name: parts[name] for name in OTHERS}
    computation = _computed(model, plan, free, software)
    bubble = max(0.0, alone - sum(others.values()) - computation)
    return {"computation": computation, "communication": whole - alone, "bubble": bubble, **others}


def _free(link: Link) -> Link:
    """Return the link with all transfers free of cost."""
    return replace(link, bandwidth=1e30, latency=0.0, start=0.0)


def _computed(model: Transformer, plan: Plan, cluster: Cluster, software: Software) -> float:
    """Return the seconds that the ranks of the pipeline compute in a step, on average."""
    whole = stages_of(model, plan, cluster, software).of(*model.layer_counts, True, True)
    return float(whole.forward + whole.backward) / plan.pp * float(microbatches(plan))


def _timeline(model: Transformer, plan: Plan, cluster: Cluster, software: Software) -> Timeline | None:
    """Return the simulated step of the pipeline, or None if there is none or it is too large."""
    if not has_picture(plan):
        return None
    return simulate_schedule(table_of(plan), times_of(model, stages_of(model, plan, cluster, software), plan))


def _why(
    plan: Plan,
    spent: dict[str, float],
    rows: tuple[Communication, ...],
    nbytes: float,
    cluster: Cluster,
    choice: PlanChoice | None,
) -> Iterator[str]:
    """Yield the bottleneck: memory if a faster plan does not fit, or else the largest part that is not computation."""
    whole, memory_limit = sum(spent.values()), usable_memory(cluster)
    if nbytes > memory_limit:
        yield f"memory: the plan needs {nbytes / 1e9:.1f} GB per rank, of {memory_limit / 1e9:.1f} GB"
    if choice is not None:
        yield from _better(plan, choice, whole, memory_limit)
    name = max((n for n in spent if n != "computation"), key=lambda n: spent[n])
    if spent[name] < 0.02 * whole:
        yield "computation: only faster devices or fewer operations make the step shorter"
        return
    yield f"{name}: {PARTS[name]} for {100 * spent[name] / whole:.1f} % of the step"
    if name == "communication" and rows:
        most = max(rows, key=lambda r: r.seconds if r.exposed is None else r.exposed)
        yield f"most of it is {most.kind} of {most.what}, {most.where}, on {most.link}"


def _better(plan: Plan, choice: PlanChoice, whole: float, memory_limit: float) -> Iterator[str]:
    """Yield the better plan of a search or, if `plan` is its best, the faster plan that does not fit into memory."""
    best, beyond = choice.best, choice.beyond
    if best.plan != plan and best.seconds < whole * (1 - 1e-6):
        yield f"another plan takes {best.seconds / whole:.3f} of the time: {differences(plan, best.plan)}"
    if best.plan == plan and beyond is not None:
        yield (
            f"memory: {differences(plan, beyond.plan)} would take {beyond.seconds / whole:.3f} of the time, but needs "
            f"{beyond.nbytes / 1e9:.1f} GB of {memory_limit / 1e9:.1f} GB"
        )


def _other_plans(
    model: Transformer,
    plan: Plan,
    cluster: Cluster,
    software: Software,
    nbytes: float,
    others: list[PricedPlan],
    on_step: OnProgress | None,
) -> Iterator[OtherPlan]:
    """Yield the other plans, and the parts in which they are slower; short tables are simulated."""
    for n, other in enumerate(others):
        if on_step:
            on_step(n, len(others))
        by_table = has_short_table(plan) and has_short_table(other.plan)
        own, theirs = (_spent(model, p, cluster, software, by_table) for p in (plan, other.plan))
        why = slower_parts(own, theirs) or f"equally fast, {(other.nbytes - nbytes) / 1e9:+.1f} GB per rank"
        yield OtherPlan(differences(plan, other.plan), other.seconds, other.nbytes, why)


def _recipes(model: Transformer, plan: Plan, cluster: Cluster, software: Software) -> Iterator[OtherPlan]:
    """Yield the plans of the nearest known recipes, and how this plan differs in time."""
    own = _spent(model, plan, cluster, software, by_table=False)
    for name, priced in nearest_recipes(model, plan, cluster, software):
        changed = differences(plan, priced.plan) or "the same plan"
        changed += ", does not fit" if priced.nbytes > usable_memory(cluster) else ""
        why = slower_parts(own, _spent(model, priced.plan, cluster, software, by_table=False))
        yield OtherPlan(f"{name}: {changed}", priced.seconds, priced.nbytes, why)


def _curves(timeline: Timeline, held: dict[str, dict[str, float]]) -> Iterator[MemoryCurve]:
    """Yield the bytes over time: state, and the activations of the microbatches in flight by the table."""
    for rank, (name, parts) in enumerate(held.items()):
        base, most = sum(parts.values()) - parts["activations"], timeline.peaks()[rank]
        each = [parts["activations"] / (most or 1.0)] * timeline.schedule.chunks
        yield pipeline_memory_curve(name, timeline, rank, base, each)
