"""Fewer ranks that take hardly longer for a step, for a model that is small relative to its cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from meshwright.cost import Cluster
from meshwright.pipeline import ScheduleError

from ..plan_data.account import Change
from ..plan_data.plan import Plan
from ..transformer_plans.candidates import ONE, candidates
from ..transformer_plans.choose import priced_plan, usable_memory
from ..transformer_plans.peak_memory import hold
from ..transformer_plans.predict import predict
from ..transformer_plans.simulated_step import simulate_step
from ..transformer_plans.sizes import Transformer
from ..transformer_plans.software import Software

LONGER = 1.3
"""Largest time of a step on fewer ranks that is told, relative to the time of the plan."""


def fewer_ranks(model: Transformer, plan: Plan, cluster: Cluster, software: Software) -> Iterator[Change]:
    """Yield the fewest ranks, by halving, on which a step takes at most 1.3 times as long as under the plan."""
    now, ranks, found = simulate_step(model, plan, cluster, software), plan.ranks, None
    while ranks % 2 == 0:
        ranks //= 2
        seconds = _fastest(model, plan, ranks, cluster, software)
        if seconds is None or seconds > LONGER * now:
            break
        found = Change(f"{ranks:,} ranks", seconds / now, ranks / plan.ranks)
    if found is not None:
        yield found


def _fastest(model: Transformer, plan: Plan, ranks: int, cluster: Cluster, software: Software) -> float | None:
    """Return the seconds of a fast plan for the same work on `ranks` ranks; None if no plan fits."""
    work, seconds = (plan.batch, plan.sequence, plan.precision), list[float]()
    for schedule in dict.fromkeys((ONE, plan.schedule)):
        given = {"schedule": schedule, "recompute": plan.recompute}
        for plans in candidates(model, ranks, *work, cluster.per_node, given):
            nbytes = np.asarray(hold(model, plans, software).nbytes)
            priced = np.asarray(predict(model, plans, cluster, software).seconds)
            fast = np.where(nbytes <= usable_memory(cluster), priced, np.inf)
            best = int(np.argmin(fast))
            with suppress(ScheduleError):
                chosen = priced_plan(plans, best, fast, nbytes)
                seconds += [simulate_step(model, chosen.plan, cluster, software)] if np.isfinite(fast[best]) else []
    return min(seconds, default=None)
