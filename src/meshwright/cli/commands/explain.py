"""`meshwright explain`: the costs of a training step and their reasons, in a terminal, as data, or as a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, cast

from meshwright.cli.commands.plan import check_devices, read_model
from meshwright.cli.console.exit_codes import FAILED
from meshwright.cli.console.files import check_folder, read_text, write_text
from meshwright.cli.console.output import print_json, print_text
from meshwright.cli.console.parser import UsageError
from meshwright.cost import Cluster, cluster
from meshwright.layout import InputError, MeshwrightError, read_json
from meshwright.report import data, page, text
from meshwright.search import Plan, PlanChoice, SearchError, Transformer, account, choose, parse_plan, progress_bar


def explain(settings: argparse.Namespace, argv: list[str]) -> int:
    """Print the account of a plan, and write the page if asked for. Returns 1 for an invalid plan."""
    check_folder(settings.html)
    measured = _measured(settings.measured)
    try:
        model, machines = read_model(settings), cluster(settings.cluster)
        plan = _plan_with_sizes(parse_plan(read_text(settings.plan)), settings)
        check_devices(plan.ranks, machines)
        others = None if settings.alone else _best_plans(model, plan, machines, settings.json)
        with progress_bar("what each plan takes", silent=settings.json) as on_step:
            told = account(model, plan, machines, others, on_step=on_step)
    except MeshwrightError as error:
        print_text(error, file=sys.stderr)
        return FAILED
    if settings.html:
        write_text(settings.html, page(told, measured))
    if settings.json:
        print_json(data(told, measured))
    else:
        print_text(text(told, measured))
    return 0


def _plan_with_sizes(plan: Plan, settings: argparse.Namespace) -> Plan:
    """Return the plan with the batch and the sequence that the command line names."""
    named = {name: getattr(settings, name) for name in ("batch", "sequence") if getattr(settings, name)}
    return replace(plan, **named)


def _best_plans(model: Transformer, plan: Plan, machines: Cluster, silent: bool) -> PlanChoice | None:
    """Return the best plans for as many ranks and the same work; None if no plan fits."""
    with progress_bar(f"plans for {plan.ranks} ranks", silent=silent) as on_step:
        try:
            return choose(model, machines, plan.ranks, plan.batch, plan.sequence, plan.precision, on_step=on_step)
        except SearchError:
            return None


def _measured(path: str | None) -> Mapping[str, float] | None:
    """Return measured numbers by name, from a JSON object or from the log of a run."""
    if path is None:
        return None
    try:
        found = _numbers(read_text(path))
        if wrong := [f"{name} = {x}" for name, x in found.items() if not 0 < x < float("inf")]:
            raise ValueError(f"{wrong[0]} is not a positive number")
        if not found:
            raise ValueError("the file has no numbers")
    except (ValueError, TypeError, KeyError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        if isinstance(error, InputError):
            why = f"{error.found}: {error.why}"
        fix = 'pass {"seconds": 1.2, "bytes": 7e10}, or the log.jsonl of a run'
        raise UsageError(f"meshwright explain: {path}: {why}\n  fix: {fix}") from error
    return found


def _numbers(text: str) -> Mapping[str, float]:
    try:
        told: Any = read_json(text)
    except InputError:  # an object on each line
        return measured_in_log([_object(read_json(line)) for line in text.splitlines() if line.strip()])
    told = _object(told)
    return measured_in_log([told]) if "event" in told else {str(name): float(value) for name, value in told.items()}


def _object(told: Any) -> Mapping[str, Any]:
    """Return the JSON value, which must be an object. Raises ValueError otherwise."""
    if not isinstance(told, dict):
        raise ValueError(f"a {type(told).__name__} instead of an object of names and numbers")
    return cast(dict[str, Any], told)


def measured_in_log(lines: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
    """Return the median seconds of a run's steps without the first, and the most bytes that a rank held.

    >>> measured_in_log([{"event": "step", "seconds": s, "peak_memory": 7} for s in (9.0, 1.0, 2.0, 1.5)])
    {'seconds': 1.5, 'bytes': 7.0}
    """
    steps = [line for line in lines if line.get("event") == "step"]
    if not steps:
        raise ValueError("the log has no step")
    seconds = median(float(step["seconds"]) for step in steps[1:] or steps)
    return {"seconds": seconds, "bytes": max(float(step["peak_memory"]) for step in steps)}
