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
    Plan,
    PlanChoice,
    Transformer,
    account,
    choose,
    differences,
    hold,
    simulate_step,
    usable_memory,
)
from meshwright.search.plan_data.account import slower_parts

from ._known_recipes import KNOWN, Known

SLOWER = 1e-6
"""Relative difference of two prices that counts as none."""


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of known recipes that are better than the plan of the search."""
    names = list(KNOWN)[:2] if quick else list(KNOWN)
    found = {name: case(KNOWN[name]) for name in names}
    broken = [name for name, told in found.items() if told["broken"]]
    return {
        "name": "plan_cases",
        "value": len(broken),
        "goal": f"no plan that does not fit, or is slower than the recipe, in {len(found)} cases",
        "ok": not broken,
        "details": found,
    }


def case(known: Known) -> dict[str, Any]:
    """Return the plan of the search and the known plan, both with their prices, and why they differ."""
    there, theirs = cluster(known.cluster), known.plan
    begin = time.perf_counter()
    found = choose(known.model, there, theirs.ranks, theirs.batch, theirs.sequence, theirs.precision)
    seconds = time.perf_counter() - begin
    ours, limit = found.best, usable_memory(there)
    price, nbytes = simulate_step(known.model, theirs, there), float(np.asarray(hold(known.model, theirs).nbytes))
    fits = nbytes <= limit
    broken = ours.nbytes > limit or (fits and ours.seconds > price * (1 + SLOWER))
    return {
        "ours": f"{ours}",
        "theirs": f"{price:.3g} s, {nbytes / 1e9:.1f} GB: {theirs}",
        "their source": known.source,
        "our time, relative": round(ours.seconds / price, 3),
        "a simpler one": str(found.simpler) if found.simpler else None,
        "because": why(known.model, ours.plan, theirs, there, found, fits),
        "seconds of the search": round(seconds, 1),
        "broken": broken,
    }


def why(model: Transformer, ours: Plan, theirs: Plan, there: Cluster, found: PlanChoice, fits: bool) -> str:
    """Return the difference between two plans and its reason, in one sentence."""
    changed = differences(ours, theirs)
    if not changed:
        return "both are the same plan"
    if not fits:
        return f"theirs has {changed} and needs more memory than a device has by our account"
    parts = [account(model, plan, there).spent for plan in (ours, theirs)]
    return f"theirs has {changed}, and takes longer by {slower_parts(*parts, most=3) or 'nothing'}"
