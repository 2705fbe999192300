"""Plans: the best plan of the search beside recipes that others use, with both prices and the difference.

A case is broken if the best plan does not fit, or if the known plan fits and is faster by our prices. Both plans are
priced in the same way, so the reason for a difference is in the parts of the prices.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from meshwright.cost import Cluster, cluster
from meshwright.search import (
    PricedPlan,
    Transformer,
    account,
    choose,
    differences,
    hold,
    simulate_step,
    usable_memory,
)
from meshwright.search.plan_data.account import slower_parts
from meshwright.search.plan_data.units import signed, size
from meshwright.search.transformer_accounts.known_recipes import KNOWN_RECIPES, Recipe

SLOWER = 1e-6
"""Relative difference of two prices that counts as none."""


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of known recipes that are better than the plan of the search."""
    names = list(KNOWN_RECIPES)[:2] if quick else list(KNOWN_RECIPES)
    found = {name: case(KNOWN_RECIPES[name]) for name in names}
    broken = [name for name, told in found.items() if told["broken"]]
    return {
        "name": "plan_cases",
        "value": len(broken),
        "goal": f"no plan that does not fit, or is slower than the recipe, in {len(found)} cases",
        "ok": not broken,
        "details": found,
    }


def case(known: Recipe) -> dict[str, Any]:
    """Return the plan of the search and the known plan, both with their prices, and why they differ."""
    there, plan = cluster(known.cluster), known.plan
    begin = time.perf_counter()
    found = choose(known.model, there, plan.ranks, plan.batch, plan.sequence, plan.precision)
    seconds = time.perf_counter() - begin
    ours, limit = found.best, usable_memory(there)
    nbytes = float(np.asarray(hold(known.model, plan).nbytes))
    theirs = PricedPlan(plan, simulate_step(known.model, plan, there), nbytes)
    is_slower = theirs.nbytes <= limit and ours.seconds > theirs.seconds * (1 + SLOWER)
    return {
        "ours": f"{ours}",
        "theirs": f"{theirs}",
        "their source": known.source,
        "our time, relative": round(ours.seconds / theirs.seconds, 3),
        "a simpler one": str(found.simpler) if found.simpler else None,
        "because": why(known.model, ours, theirs, there),
        "seconds of the search": round(seconds, 1),
        "broken": ours.nbytes > limit or is_slower,
    }


def why(model: Transformer, ours: PricedPlan, theirs: PricedPlan, there: Cluster) -> str:
    """Return the difference between two plans, and its price in memory and in time, in one sentence."""
    changed, limit = differences(ours.plan, theirs.plan), usable_memory(there)
    if not changed:
        return "both are the same plan"
    spent = [account(model, priced.plan, there).spent for priced in (ours, theirs)]
    parts = slower_parts(*spent, most=3) or "no part differs"
    needs = f", needs {size(theirs.nbytes)} of the {size(limit)} that a rank may use" if theirs.nbytes > limit else ""
    return f"theirs has {changed}{needs}, and takes {signed(theirs.seconds - ours.seconds)}: {parts}"
