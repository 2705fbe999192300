"""Seconds of a plan with its pipeline simulated by its table, instead of the closed forms of `predict`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from meshwright.cost import Cluster, Flags, Habits, Numbers
from meshwright.pipeline import Schedule, Times, schedule_by_name, simulate_schedule

from ..plan_data.plan import Plan
from .degrees import microbatches
from .layer_shares import part_kinds
from .predict import StageSeconds, check_priced, predict, stages_of
from .schedule_facts import FLUSH, facts_of
from .sizes import Transformer
from .software import MESHWRIGHT, Software

WHOLE_TABLE = 2**12
"""Chunks times microbatches up to which the whole table is simulated; larger ones are extrapolated from two tables."""
FORMULA = 16
"""Work of a closed form, in chunks times microbatches that are simulated in the same time."""
SHORT = 2**11
"""Chunks times microbatches of a table that is made and simulated in a short time."""
LONG = 2**16
"""Chunks times microbatches above which a table is too large for a picture."""


def simulate_step(
    model: Transformer, plan: Plan, cluster: Cluster, software: Software = MESHWRIGHT, habits: Habits | None = None
) -> float:
    """Return the seconds of a step as `predict` does, but with the pipeline simulated action by action.

    Messages take time, and only other actions of a rank hide them. A long pipeline repeats a steady state, so its time
    is extrapolated from two shorter tables. If these are too large as well, the result is that of `predict`. What is
    simulated depends on the plan alone, so the result is the same on any machine.

    Raises:
        SearchError: as `predict`.
        ScheduleError: the schedule has no table for the plan's ranks and microbatches.
    """
    check_priced(plan, cluster)
    spent = _simulated_pipeline(model, plan, cluster, software, habits)
    return float(predict(model, plan, cluster, software, habits, spent).seconds)


def _simulated_pipeline(
    model: Transformer, plan: Plan, cluster: Cluster, software: Software, habits: Habits | None
) -> float | None:
    """Return the seconds of all microbatches by the tables that are simulated; None if there are none."""
    counts = _simulated_counts(plan)
    if not counts:
        return None
    times = times_of(model, stages_of(model, plan, cluster, software, habits), plan)
    spent = [simulate_schedule(_table(plan.schedule, plan.pp, n, plan.chunks), times).makespan for n in counts]
    if len(counts) == 1:
        return spent[0]
    each = (spent[1] - spent[0]) / (counts[1] - counts[0])
    return spent[1] + (int(microbatches(plan)) - counts[1]) * each


def _simulated_counts(plan: Plan) -> tuple[int, ...]:
    """Return the numbers of microbatches whose tables are simulated: all of them, two smaller ones, or none."""
    p, count = plan.pp, int(microbatches(plan))
    if p == 1 or plan.zero == 3:
        return ()
    most, shorter = facts_of(plan.schedule).table, _shorter_counts(p, count)
    is_whole = count <= shorter[-1] or p * plan.chunks * count <= min(WHOLE_TABLE, most)
    counts = (count,) if is_whole else shorter
    return counts if p * plan.chunks * counts[-1] <= most else ()


def _shorter_counts(p: int, count: int) -> tuple[int, int]:
    """Return two numbers of microbatches that differ from `count` by multiples of the ranks, after the warm-up."""
    rest = count % p
    return 2 * p + rest, 3 * p + rest


def has_table(schedule: str, p: Numbers, count: Numbers, chunks: Numbers) -> Flags:
    """True if a table gives the time of the pipeline, or if the closed form of the schedule holds without one."""
    facts = facts_of(schedule)
    if facts.filling == FLUSH:
        return np.full(np.shape(p), True)
    return p * chunks * np.minimum(count, 3 * p + np.mod(count, p)) <= facts.table


class SimulationWork:
    """The work of simulating plans, one after the other; a table that several plans share is made once."""

    def __init__(self) -> None:
        self.units = 0
        self._made: set[tuple[str, int, int, int]] = set()

    def of(self, plan: Plan) -> int:
        """Return the work of one more plan, in chunks times microbatches that are simulated."""
        units, making = FORMULA, facts_of(plan.schedule).making
        for shape in _shapes(plan):
            units += shape[1] * shape[2] * shape[3] * (1 if shape in self._made else 1 + making)
        return units

    def add(self, plan: Plan) -> None:
        """Count the work of a plan."""
        self.units += self.of(plan)
        self._made.update(_shapes(plan))


def _shapes(plan: Plan) -> list[tuple[str, int, int, int]]:
    return [(plan.schedule, plan.pp, count, plan.chunks) for count in _simulated_counts(plan)]


def has_short_table(plan: Plan) -> bool:
    """True if the plan's table is made and simulated in a short time."""
    return plan.pp == 1 or plan.pp * plan.chunks * plan.microbatches <= SHORT


def has_picture(plan: Plan) -> bool:
    """True if the plan has a pipeline whose table can be drawn."""
    return plan.pp > 1 and plan.zero != 3 and plan.pp * plan.chunks * plan.microbatches <= LONG


def table_of(plan: Plan) -> Schedule:
    """Return the table of a plan's schedule.

    Raises:
        ScheduleError: there is none.
    """
    return _table(plan.schedule, plan.pp, int(microbatches(plan)), plan.chunks)


@lru_cache(maxsize=64)
def _table(schedule: str, ranks: int, count: int, chunks: int) -> Schedule:
    """Return the table, as one object for one name and shape: large tables take seconds to make."""
    return schedule_by_name(schedule).build(ranks, count, chunks)


def times_of(model: Transformer, stages: StageSeconds, plan: Plan) -> Times:
    """Return the seconds of each part of the model, with the embedding or the head at its ends."""
    parts = part_kinds(model, plan.pp * plan.chunks)
    spent = [stages.of(dense, sparse, n == 0, n == len(parts) - 1) for n, (dense, sparse) in enumerate(parts)]
    return Times(
        tuple(float(x.forward) for x in spent),
        tuple(max(float(x.backward - x.weights), 0.0) for x in spent),
        tuple(float(x.weights) for x in spent),
        transfer=float(stages.message),
    )
