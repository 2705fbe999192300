"""`meshwright explain`: why a training step takes what it takes, in a terminal, as data, or as a page."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace

from meshwright.cli._files import read_text, write_text
from meshwright.cli._parser import UsageError
from meshwright.cli._plan import read_model
from meshwright.cost import Cluster, cluster
from meshwright.layout import MeshwrightError
from meshwright.report import data, page, text
from meshwright.search import Choice, Plan, SearchError, Transformer, account, choose, parse_plan, shown

FAILED = 1


def explain(settings: argparse.Namespace, argv: list[str]) -> int:
    """Prints the account of a plan, and writes the page that was asked for. 1 for a plan that cannot be."""
    measured = _measured(settings.measured)
    try:
        model, machines = read_model(settings.model), cluster(settings.cluster)
        plan = _asked(parse_plan(read_text(settings.plan)), settings)
        others = None if settings.alone else _others(model, plan, machines, settings.json)
        with shown("what each plan takes", silent=settings.json) as on_step:
            told = account(model, plan, machines, others, on_step=on_step)
    except MeshwrightError as error:
        print(error, file=sys.stderr)
        return FAILED
    if settings.html:
        write_text(settings.html, page(told, measured))
    print(json.dumps(data(told, measured)) if settings.json else text(told, measured))
    return 0


def _asked(plan: Plan, settings: argparse.Namespace) -> Plan:
    """The plan with the batch and the sequence that the command line names."""
    named = {name: getattr(settings, name) for name in ("batch", "sequence") if getattr(settings, name)}
    return replace(plan, **named)


def _others(model: Transformer, plan: Plan, machines: Cluster, silent: bool) -> Choice | None:
    """The best plans for as many ranks and the same work; None where nothing fits."""
    with shown(f"plans for {plan.ranks} ranks", silent=silent) as on_step:
        try:
            return choose(
                model, machines, plan.ranks, plan.batch, plan.sequence, plan.precision, on_step=on_step
            )  # fmt: skip
        except SearchError:
            return None


def _measured(path: str | None) -> Mapping[str, float] | None:
    """Numbers by name."""
    if path is None:
        return None
    try:
        return {str(name): float(value) for name, value in json.loads(read_text(path)).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f'meshwright explain: {path}: {error}\n  write: {{"seconds": 1.2, "bytes": 7e10}}') from error
