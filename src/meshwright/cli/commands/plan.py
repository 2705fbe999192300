"""`meshwright plan` finds the best plan for a model on a cluster; `meshwright predict` predicts a given plan."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from meshwright.cli.commands.plan_phases import check_options, print_phase_plans
from meshwright.cli.console.exit_codes import FAILED
from meshwright.cli.console.files import check_folder, read_object, read_text, write_text
from meshwright.cli.console.output import print_json, print_text
from meshwright.cli.console.parser import UsageError
from meshwright.cost import Cluster, cluster
from meshwright.layout import MeshwrightError
from meshwright.search import (
    Change,
    Plan,
    PlanChoice,
    PricedPlan,
    Throughput,
    Transformer,
    assumptions,
    changes,
    choose,
    differences,
    hold,
    nearest_recipes,
    parse_plan,
    plan_of,
    predict,
    progress_bar,
    simulate_step,
    throughput,
    transformer_of,
    usable_memory,
)

GIGA = 1e9


def plan(settings: argparse.Namespace, argv: list[str]) -> int:
    """Print the best plan with its costs, and the next best plans. Returns 1 if no plan fits."""
    check_folder(settings.out)
    check_options(settings)
    try:
        model, machines = read_model(settings), cluster(settings.cluster)
        ranks = settings.ranks or machines.devices
        if ranks is None:
            raise UsageError(
                "meshwright plan: the number of devices is missing\n  fix: pass --cluster 64xH100, or --ranks 64"
            )
        check_devices(ranks, machines)
        if doubled := sorted({"batch", "sequence", "precision"} & set(settings.given)):
            raise UsageError(f"meshwright plan: --given {doubled[0]}\n  fix: pass --{doubled[0]} alone")
        plan_of(settings.given)
        if settings.phases != ("train",):
            return print_phase_plans(settings, model, machines, ranks)
        with progress_bar(f"plans for {ranks} ranks", silent=settings.json) as on_step:
            asked = (settings.batch, settings.sequence, settings.precision)
            found = choose(model, machines, ranks, *asked, on_step=on_step, **settings.given)
    except MeshwrightError as error:
        print_text(error, file=sys.stderr)
        return FAILED
    print_choice(settings, model, found, machines)
    return 0


def print_choice(settings: argparse.Namespace, model: Transformer, found: PlanChoice, machines: Cluster) -> None:
    """Print the best plan of a search, the next ones, and the nearest known recipes; write it to a file if asked."""
    best = plan_costs(model, found.best.plan, machines, found)
    if settings.out:
        write_text(settings.out, found.best.plan.text())
    if settings.json:
        print_json({**best, **choice_data(model, found, machines)})
        return
    print_text(plan_costs_text(best))
    fastest = f"the fastest of {found.fitting:,} plans that fit" if found.fitting > 1 else "the only plan that fits"
    print_text(f"\n{fastest} ({found.considered:,} considered){'; the next best:' if found.next else ''}")
    for other in found.next[:3]:
        print_text(f"  {other.seconds / found.best.seconds:.3f} x  {differences(found.best.plan, other.plan)}")
    if simpler := found.simpler:
        times, changed = simpler.seconds / found.best.seconds, differences(found.best.plan, simpler.plan)
        print_text(f"\na simpler plan, nearly as fast:\n  {times:.3f} x  {changed}")
    print_text(surroundings_text(model, found, machines))


def choice_data(model: Transformer, found: PlanChoice, machines: Cluster) -> dict[str, Any]:
    """Return what a search found besides the best plan, and the nearest known recipes, for programs."""
    recipes = nearest_recipes(model, found.best.plan, machines)
    return {
        "considered": found.considered,
        "fitting": found.fitting,
        "searched": found.seconds,
        "next": [priced_plan_data(p) for p in found.next],
        "simpler": priced_plan_data(found.simpler) if found.simpler else None,
        "recipes": [{"name": name, **priced_plan_data(priced)} for name, priced in recipes],
    }


def surroundings_text(model: Transformer, found: PlanChoice, machines: Cluster) -> str:
    """Return the nearest known recipes with their prices, what would change the plan, and what its price assumes."""
    best = found.best
    recipes = [
        f"{theirs.seconds / best.seconds:.3f} x  {theirs.nbytes / GIGA:.1f} GB  {name}: "
        f"{differences(best.plan, theirs.plan) or 'the same plan'}"
        f"{', does not fit' if theirs.nbytes > usable_memory(machines) else ''}"
        for name, theirs in nearest_recipes(model, best.plan, machines)
    ]
    parts = {
        "known recipes, for this model and cluster": recipes,
        "what would change it": changes(model, best.plan, machines, choice=found),
        "what this assumes": assumptions(model, best.plan, machines),
    }
    lines = [line for title, own in parts.items() if own for line in ("", title, *(f"  {x}" for x in own))]
    return "\n".join(lines)


def priced_plan_data(priced: PricedPlan) -> dict[str, Any]:
    """Return a plan of the search with its costs, for programs."""
    return {"plan": asdict(priced.plan), "seconds": priced.seconds, "bytes": priced.nbytes}


def predict_step(settings: argparse.Namespace, argv: list[str]) -> int:
    """Print the costs of a step under a plan, and whether it fits."""
    try:
        model, machines = read_model(settings), cluster(settings.cluster)
        with progress_bar("the step, action by action", silent=settings.json):
            asked = parse_plan(read_text(settings.plan))
            check_devices(asked.ranks, machines)
            told = plan_costs(model, asked, machines)
    except MeshwrightError as error:
        print_text(error, file=sys.stderr)
        return FAILED
    if settings.json:
        print_json(told)
    else:
        print_text(plan_costs_text(told))
    return 0


def check_devices(ranks: int, machines: Cluster) -> None:
    """Raise UsageError for more ranks than devices, if the cluster says how many it has."""
    if machines.devices is not None and ranks > machines.devices:
        fix = f"pass --cluster {ranks}x{machines.device.name}, or fewer ranks"
        raise UsageError(f"meshwright: {ranks} ranks on a cluster of {machines.devices} devices\n  fix: {fix}")


def plan_costs(model: Transformer, asked: Plan, machines: Cluster, choice: PlanChoice | None = None) -> dict[str, Any]:
    """Return the costs of a plan, for programs."""
    step, held = predict(model, asked, machines), hold(model, asked)
    seconds, nbytes = simulate_step(model, asked, machines), float(np.asarray(held.nbytes))
    parts = {name: float(np.asarray(x)) for name, x in step.parts.items()}
    parts["microbatches"] += seconds - sum(parts.values())
    rates, helps = throughput(model, asked, machines, seconds), changes(model, asked, machines, choice=choice)
    return {
        "plan": asdict(asked),
        "ranks": asked.ranks,
        "seconds": seconds,
        "tokens per second": rates.tokens,
        "share of the peak": rates.peak_share,
        "device-hours for 10^9 tokens": rates.device_hours,
        "bytes": nbytes,
        "memory": usable_memory(machines),
        "fits": nbytes <= usable_memory(machines),
        "changes": [asdict(change) for change in helps],
        "assumed": list(assumptions(model, asked, machines)),
        "seconds of": parts,
        "bytes of": {name: float(np.asarray(x)) for name, x in held.parts.items()},
    }


def plan_costs_text(told: Mapping[str, Any]) -> str:
    """Return the costs of a plan, for people."""
    usual = asdict(Plan())
    lines = [f"  {name:<20} {value}" for name, value in told["plan"].items() if value != usual[name]]
    fits = "" if told["fits"] else "  DOES NOT FIT"
    rates = Throughput(told["tokens per second"], told["share of the peak"], told["device-hours for 10^9 tokens"])
    helps = [f"what would help most: {Change(**change)}" for change in told["changes"][:1]]
    return "\n".join(
        [
            f"{rates}",
            f"{told['seconds']:.4g} s per step; "
            f"{told['bytes'] / GIGA:.1f} GB of {told['memory'] / GIGA:.0f} GB on the fullest rank{fits}",
            *helps,
            "",
            f"{told['ranks']:,} rank{'s' * (told['ranks'] > 1)}",
            *lines,
            "",
            "seconds of a step",
            *(f"  {name:<26} {s:10.4g} s" for name, s in told["seconds of"].items()),
            "",
            "bytes of the fullest rank",
            *(f"  {name:<26} {b / GIGA:10.2f} GB" for name, b in told["bytes of"].items()),
        ]
    )


def read_model(settings: argparse.Namespace) -> Transformer:
    """Return the model of the command line, with the imbalance of experts and the tokens ahead that it gives."""
    path, imbalance = settings.model, settings.imbalance
    model = transformer_of(read_object(path, "pass a model's config.json"), settings.ahead)
    if imbalance is None:
        return model
    if model.experts is None:
        raise UsageError(f"meshwright: --imbalance {imbalance:g}: {path} has no experts\n  fix: leave out --imbalance")
    return replace(model, experts=replace(model.experts, imbalance=imbalance))
