"""Seconds of a plan with its pipeline simulated by its table, instead of the closed forms of `predict`."""

from __future__ import annotations

from functools import lru_cache

from meshwright.cost import Cluster, Habits, Numbers
from meshwright.pipeline import Schedule, Times, schedule_by_name, simulate_schedule

from ..plan_data.plan import Plan
from .degrees import microbatches
from .predict import StageSeconds, predict, stages_of
from .sizes import Transformer
from .software import MESHWRIGHT, Software

LONG = 2**20
"""Chunks times microbatches above which no table is made: warm-up and drain are then negligible."""
SHORT = 2**11
"""Chunks times microbatches of a table that is made and simulated in a short time."""


def simulate_step(
    model: Transformer, plan: Plan, cluster: Cluster, software: Software = MESHWRIGHT, habits: Habits | None = None
) -> float:
    """Return the seconds of a step as `predict` does, but with the pipeline simulated action by action.

    Messages take time, and only other actions of a rank hide them. Above `LONG`, the result is that of `predict`.

    Raises:
        SearchError: as `predict`.
        ScheduleError: the schedule has no table for the plan's ranks and microbatches.
    """
    told = predict(model, plan, cluster, software, habits)
    if plan.pp == 1 or plan.zero == 3 or plan.pp * plan.chunks * plan.microbatches > LONG:
        return float(told.seconds)
    stages = stages_of(model, plan, cluster, software, habits)
    table = table_of(plan)
    others = sum(float(s) for name, s in told.parts.items() if name != "microbatches")
    return simulate_schedule(table, times_of(stages, plan)).makespan + others


def has_short_table(plan: Plan) -> bool:
    """True if the plan's table is made and simulated in a short time."""
    return plan.pp == 1 or plan.pp * plan.chunks * plan.microbatches <= SHORT


def table_of(plan: Plan) -> Schedule:
    """Return the table of a plan's schedule.

    Raises:
        ScheduleError: there is none.
    """
    return _table(plan.schedule, plan.pp, int(microbatches(plan)), plan.chunks)


@lru_cache(maxsize=32)
def _table(schedule: str, ranks: int, count: int, chunks: int) -> Schedule:
    """Return the table, as one object for one name and shape: large tables take seconds to make."""
    return schedule_by_name(schedule).build(ranks, count, chunks)


def times_of(stages: StageSeconds, plan: Plan) -> Times:
    """Return the seconds of each chunk: its part of a rank's layers, with the embedding or the head at the ends."""
    count = plan.pp * plan.chunks

    def each(first: Numbers, other: Numbers, last: Numbers, before: Numbers, behind: Numbers) -> tuple[float, ...]:
        ranks = [first, *[other] * (plan.pp - 2), last]
        own = [float(ranks[c % plan.pp]) / plan.chunks for c in range(count)]
        own[0] += float(before)
        own[-1] += float(behind)
        return tuple(own)

    first, other, last, before, behind = stages.first, stages.other, stages.last, stages.before, stages.behind
    weights = each(*(s.weights for s in (first, other, last, before, behind)))
    whole = each(*(s.backward for s in (first, other, last, before, behind)))
    return Times(
        each(*(s.forward for s in (first, other, last, before, behind))),
        tuple(max(b - w, 0.0) for b, w in zip(whole, weights, strict=True)),
        weights,
        transfer=float(stages.message),
    )
