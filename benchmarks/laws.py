"""Search: broken laws of plans, over random models, clusters and sizes of a step.

States are conserved: the bytes of all ranks are those of the tensors that the plan lists. More replicas and a higher
stage of ZeRO never need more memory. More bandwidth never makes a plan slower, nor generation beside it. Any number of
layers runs on any number of stages. A group of tensor parallelism stays in a node. The plan that is printed as best is
the best of those that are printed, and does not depend on a clock. A number of ranks without a plan is refused with
numbers that have one. Published runs fit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from math import isclose, prod
from typing import Any
from unittest.mock import patch

import numpy as np

from meshwright.cost import Cluster
from meshwright.search import (
    GenerationSizes,
    Plan,
    Plans,
    SearchError,
    Transformer,
    choose,
    generation_seconds,
    hold,
    predict,
    simulate_step,
    usable_memory,
    weight_move,
)
from meshwright.search.phase_plans.generation import sampler_layouts
from meshwright.search.phase_plans.weight_moves import sampler_bytes
from meshwright.search.transformer_plans.candidates import meshes
from meshwright.search.transformer_plans.layer_shares import part_sizes, rank_layers
from meshwright.search.transformer_plans.nearest_sizes import nearest_sizes
from meshwright.search.transformer_plans.peak_memory import hold_each
from meshwright.search.transformer_plans.tensor_layouts import tensor_layouts

from ._law_cases import Case, random_case, random_plan
from ._published import Run, runs

CLOSE = 1e-9
MOMENTS, SHARDED = 12.0, 16.0
"""Bytes of the optimizer's states per parameter, and of all states with ZeRO-3."""
STATES = "parameters and gradients", "optimizer"
Broken = Iterator[str]
Law = Callable[[Case, int], Broken]


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of broken cases."""
    found = {name: broken(law, range(times // 20 if quick else times)) for name, (law, times) in LAWS.items()}
    refused = list(published_runs_that_do_not_fit())
    cases, published = sum(n for n, _ in found.values()), sum(1 for _ in runs_that_must_fit())
    wrong = {name: texts for name, (_, texts) in found.items()} | {"published runs fit": refused}
    total = sum(map(len, wrong.values()))
    return {
        "name": "laws",
        "value": total,
        "goal": f"no broken law in {cases:,} random cases (at least 5,000) and {published} published runs",
        "ok": total == 0 and (quick or cases >= 5000),
        "details": {
            "cases": {name: n for name, (n, _) in found.items()},
            "broken": {name: texts[:10] for name, texts in wrong.items() if texts},
        },
    }


def broken(law: Law, seeds: range) -> tuple[int, list[str]]:
    """Return the number of cases, and a text for each case in which a law is broken."""
    found: list[str] = []
    for seed in seeds:
        found += [f"case {seed}: {text}" for text in [next(law(random_case(seed), seed), None)] if text]
    return len(seeds), found


# --- states


def states_are_conserved(case: Case, seed: int) -> Broken:
    """Yield the difference between the states of all ranks and those of the tensors that the plan lists."""
    plan = random_plan(case, seed)
    if plan is None:
        return
    ranks = hold_each(case.model, plan)
    held = sum(float(rank["optimizer"]) for rank in ranks) * plan.tp * plan.dp * plan.cp
    held += sum(float(rank[STATES[0]]) for rank in ranks) * plan.tp * plan.dp * plan.cp if plan.zero == 3 else 0.0
    each, wanted = SHARDED if plan.zero == 3 else MOMENTS, 0.0
    for elements, is_expert in listed_tensors(case.model, plan):
        replicas = plan.dp * plan.cp * (plan.tp / plan.ep if is_expert else 1)
        wanted += elements * each * (1 if plan.zero else replicas)
    if not isclose(held, wanted, rel_tol=CLOSE):
        yield f"{held:.6g} bytes of states on all ranks, {wanted:.6g} in the tensors: {case.model}, {plan}"
    if plan.tp * plan.pp * plan.ep == 1 and not isclose(wanted, case.model.parameters * each * replicas_of(plan)):
        yield f"{wanted:.6g} bytes in the tensors, {case.model.parameters:,} parameters: {plan}"


def replicas_of(plan: Plan) -> int:
    return 1 if plan.zero else plan.dp * plan.cp


def listed_tensors(model: Transformer, plan: Plan) -> Iterator[tuple[float, bool]]:
    """Yield the elements of each listed parameter on all ranks of one replica, and whether it is of experts."""
    for row in tensor_layouts(model, replace(plan, zero=0)):
        dims = re.findall(r"(\d+)((?:@\w+)*)", row.layout.split("[")[1])
        axes = {axis for _, named in dims for axis in named.split("@")[1:]}
        is_expert = row.name.startswith("experts'")
        if row.layer == "one microbatch" or row.note == "the embedding's table":
            continue
        repeated = 1 if is_expert or "tp" in axes else plan.tp
        yield prod(int(n) for n, _ in dims) * row.count * repeated, is_expert


def memory_is_monotone(case: Case, seed: int) -> Broken:
    """Yield the plans that need more memory on twice as many replicas, or with a higher stage of ZeRO."""
    for plans in some_bundles(case, seed):
        base = nbytes(case, plans)
        changed = {
            "twice the replicas, the same batch": replace(plans, dp=plans.dp * 2),
            "twice the replicas and the batch": replace(plans, dp=plans.dp * 2, batch=plans.batch * 2),
            "a higher stage of ZeRO": replace(plans, zero=np.minimum(plans.zero + 1, 3)),
        }
        for what, other in changed.items():
            yield from first_where(nbytes(case, other) > base * (1 + CLOSE), plans, what)


def nbytes(case: Case, plans: Plans) -> Any:
    return np.asarray(hold(case.model, plans).nbytes)


def some_bundles(case: Case, seed: int, most: int = 3) -> list[Plans]:
    """Return a few bundles of a case: all of them take long on many ranks."""
    bundles = list(case.bundles())
    return [bundles[n] for n in np.random.default_rng(seed).permutation(len(bundles))[:most]]


def first_where(wrong: Any, plans: Plans, what: str) -> Broken:
    if np.any(wrong):
        at = int(np.argmax(wrong))
        names = ("dp", "tp", "pp", "cp", "ep", "chunks", "zero", "microbatch")
        told = ", ".join(f"{name}={getattr(plans, name)[at]:g}" for name in names)
        yield f"{what}: {told}, {plans.schedule}, recompute {plans.recompute}"


# --- seconds


def time_is_monotone(case: Case, seed: int) -> Broken:
    """Yield the plans that are slower with more bandwidth."""
    more = {what: seconds(case, faster) for what, faster in faster_clusters(case.cluster).items()}
    for plans in some_bundles(case, seed):
        base = np.asarray(predict(case.model, plans, case.cluster).seconds)
        for what, priced in more.items():
            yield from first_where(priced(plans) > base * (1 + CLOSE), plans, f"slower with more bandwidth {what}")
    plan = random_plan(case, seed)
    if plan is not None and plan.pp * plan.chunks * plan.microbatches < 2**9:
        base = simulate_step(case.model, plan, case.cluster)
        for what, faster in faster_clusters(case.cluster).items():
            if simulate_step(case.model, plan, faster) > base * (1 + CLOSE):
                yield f"simulated slower with more bandwidth {what}: {plan}"


def seconds(case: Case, cluster: Cluster) -> Callable[[Plans], Any]:
    return lambda plans: np.asarray(predict(case.model, plans, cluster).seconds)


def faster_clusters(cluster: Cluster) -> dict[str, Cluster]:
    """Return clusters with half more bandwidth: of the links in a node, of the network, and of memory."""

    inside, outside, device = cluster.inside, cluster.outside, cluster.device
    wider = outside and replace(outside, bandwidth=outside.bandwidth * 1.5)
    return {
        "in nodes": replace(cluster, inside=replace(inside, bandwidth=inside.bandwidth * 1.5)),
        "between nodes": replace(cluster, outside=wider),
        "of memory": replace(cluster, device=replace(device, bandwidth=device.bandwidth * 1.5)),
    }


def generation_is_monotone(case: Case, seed: int) -> Broken:
    """Yield generations and moves of weights that are slower with more bandwidth, or move more than all weights."""
    plan, model, draw = random_plan(case, seed), case.model, np.random.default_rng(seed)
    if plan is None or model.experts or model.latent or model.ahead:
        return
    sizes = GenerationSizes(*(int(n) for n in draw.integers(1, [512, 2048, 2048, 16])))
    layouts = list(sampler_layouts(model, plan.ranks, case.cluster.per_node, sizes))
    layout = layouts[int(draw.integers(len(layouts)))]

    def parts(cluster: Cluster) -> tuple[float, ...]:
        generated = generation_seconds(model, layout, sizes, cluster)
        return generated.prefill, generated.step, weight_move(model, plan, layout, cluster).seconds

    base, move = parts(case.cluster), weight_move(model, plan, layout, case.cluster)
    for what, faster in faster_clusters(case.cluster).items():
        if any(now > before * (1 + CLOSE) for now, before in zip(parts(faster), base, strict=True)):
            yield f"{sizes} on {layout} is slower with more bandwidth {what}: {plan}"
    if not 0 <= move.received <= sampler_bytes(model, layout) or (move.is_shared and move.seconds):
        yield f"{move} from {plan} to {layout}"


# --- layers


def layers_go_over_any_stages(case: Case, seed: int) -> Broken:
    """Yield the divisions of the model that lose layers, are uneven without need, or are not tried."""
    model, draw = case.model, np.random.default_rng(seed)
    ranks = int(draw.integers(1, model.layers + 1))
    chunks = int(draw.integers(1, model.layers // ranks + 1))
    sizes, most = part_sizes(model, ranks * chunks), -(-model.layers // (ranks * chunks))
    if sum(sizes) != model.layers or min(sizes) < 0 or max(sizes) > most:
        yield f"{model.layers} layers on {ranks} ranks of {chunks} chunks: {sizes}"
    inner = sizes[1:-1]
    if inner and max(inner) - min(inner) > 1:
        yield f"{model.layers} layers on {ranks} ranks of {chunks} chunks: uneven inside, {sizes}"
    for schedule in ("Interleaved 1F1B", *(("ZB-V",) if chunks == 2 else ())):
        own = rank_layers(model, schedule, ranks, chunks)
        ends = sum(bool(x.first) + bool(x.last) for x in own)
        if sum(x.dense + x.sparse for x in own) != model.layers + model.ahead or ends != 2:
            yield f"{model.layers} layers by {schedule} on {ranks} ranks of {chunks} chunks: {own}"
    tried = {pp for _, _, pp, _ in meshes(model, ranks, 1, 1024, 1, {})}
    if ranks not in tried:
        yield f"{model.layers} layers on {ranks} ranks: only pp {tried} are tried"


def tensor_groups_stay_in_a_node(case: Case, seed: int) -> Broken:
    """Yield the meshes with a group of tensor parallelism on two nodes: its sums are priced by the links of one."""
    node = int(np.random.default_rng(seed).choice([3, 4, 6, 8, 72]))
    for mesh in meshes(case.model, case.ranks, case.batch, case.sequence, node, {}):
        tp = mesh[1]
        if any(begin // node != (begin + tp - 1) // node for begin in range(0, case.ranks, tp)):
            yield f"tp {tp} on {case.ranks} ranks, {node} per node"


# --- the search


def the_best_is_the_best_printed(case: Case, seed: int) -> Broken:
    """Yield choices that a slow clock changes, that are not in order, do not fit, or are priced otherwise."""
    ranks = min(case.ranks, 16)
    arguments = case.model, case.cluster, ranks, case.batch, min(case.sequence, 4096)
    try:
        found = choose(*arguments)
    except SearchError as error:
        if "fix:" not in str(error):
            yield f"no fix in {error}"
        return
    late = count(step=1000.0)
    with patch.object(time, "monotonic", lambda: next(late)):
        again = choose(*arguments)
    if replace(again, seconds=found.seconds) != found:
        yield f"a slow machine finds {again.best} instead of {found.best}"
    if any(p.seconds < found.best.seconds * (1 - 1e-6) for p in found.next):
        yield f"printed as best: {found.best}, but next is {min(found.next, key=lambda p: p.seconds)}"
    for priced in (found.best, *found.next):
        told = simulate_step(case.model, priced.plan, case.cluster)
        if not isclose(told, priced.seconds, rel_tol=CLOSE):
            yield f"listed with {priced.seconds} s, priced with {told} s: {priced.plan}"
        if priced.nbytes > usable_memory(case.cluster):
            yield f"does not fit: {priced}"


def refused_sizes_name_sizes_that_work(case: Case, seed: int) -> Broken:
    """Yield the sizes that are refused without another number of ranks, or with one that has no plan either."""
    draw = np.random.default_rng(seed)
    ranks, batch = int(draw.integers(1, 200_000)), int(draw.integers(1, 5000))
    node, model = case.cluster.per_node, case.model

    def works(ranks: int, batch: int) -> bool:
        return next(meshes(model, ranks, batch, case.sequence, node, {}), None) is not None

    if works(ranks, batch):
        return
    near = nearest_sizes(model, ranks, batch, case.sequence, node, {})
    if not near.ranks or not all(works(n, batch) for n in near.ranks) or not all(works(ranks, n) for n in near.batch):
        yield f"{ranks} ranks and {batch} sequences: {near}"
    between = range(max(n for n in (0, *near.ranks) if n < ranks) + 1, ranks)
    if any(works(n, batch) for n in between[-50:]):
        yield f"{ranks} ranks: there is a number of ranks that is nearer than {near.ranks}"


def published_runs_that_do_not_fit() -> Broken:
    """Yield the published runs that ran and are said not to fit."""
    for r in runs_that_must_fit():
        needed = float(np.asarray(hold(r.model, r.plan, r.software).nbytes))
        if needed > usable_memory(r.cluster):
            yield f"{r.name}: {needed / 1e9:.1f} GB of {usable_memory(r.cluster) / 1e9:.1f}"


def runs_that_must_fit() -> Iterator[Run]:
    """Return the published runs whose description is complete."""
    return (r for r in runs() if r.is_complete)


LAWS: Mapping[str, tuple[Law, int]] = {
    "states are conserved": (states_are_conserved, 2000),
    "memory is monotone": (memory_is_monotone, 800),
    "time is monotone": (time_is_monotone, 400),
    "generation is monotone": (generation_is_monotone, 400),
    "layers go over any stages": (layers_go_over_any_stages, 1600),
    "tensor groups stay in a node": (tensor_groups_stay_in_a_node, 1600),
    "the best is the best printed": (the_best_is_the_best_printed, 60),
    "refused sizes name sizes that work": (refused_sizes_name_sizes_that_work, 400),
}
"""Law → its function, and the number of random cases."""
