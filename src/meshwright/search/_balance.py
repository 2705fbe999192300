"""Layers shared out over the stages of a pipeline, and the schedule that takes least time for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from heapq import merge
from itertools import islice
from operator import itemgetter

from meshwright.pipeline import Schedule, ScheduleError, Shape, Timeline, known, simulate

from ._layer_costs import LayerCosts
from ._starts import Message, Starts, in_order

SCHEDULES = {"1F1B": 2**14, "ZB-H1": 2**11, "ZB-1p": 2**8, "ZB-2p": 2**8}
"""Schedules of one chunk per stage → the stages times microbatches up to which their tables are made at once."""
RUN = 2**14
"""Stages times microbatches that are run, all tables together."""
SHORTER = 1e-6
"""What takes less by this part is no shorter."""


@dataclass(frozen=True)
class Balanced:
    """Where stages begin, what they take each, and the schedule run action by action."""

    starts: Starts
    costs: LayerCosts = field(repr=False)
    timeline: Timeline = field(repr=False)

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @cached_property
    def held(self) -> tuple[float, ...]:
        """The most bytes that a rank of each stage holds."""
        return self.timeline.peaks(self.costs.memory)


def balance(layers: LayerCosts, stages: int, microbatches: int, room: float, message: Message) -> Balanced | None:
    """The stages and the schedule of least time that fit into `room` bytes a rank; None where none do.

    Tables are run, with stages that begin at all layers they may, in the order of what they take at the least, until no
    other can be faster. Where that would be many, the fastest of the first of them is taken.
    """
    tables = [table for name in SCHEDULES if (table := _table(name, stages, microbatches)) is not None]
    best: Balanced | None = None
    for bound, table, starts in islice(
        merge(*(in_order(layers, table, room, message) for table in tables), key=itemgetter(0)),
        max(1, RUN // (stages * microbatches)),
    ):
        if best is not None and bound >= _seconds(best) * (1 - SHORTER):
            break
        found = _run(layers, table, starts, message)
        best = found if best is None or _seconds(found) < _seconds(best) * (1 - SHORTER) else best
    return best


def _run(layers: LayerCosts, table: Schedule, starts: Starts, message: Message) -> Balanced:
    costs = layers.stages(starts)
    return Balanced(starts, costs, simulate(table, costs.times(message)))


@lru_cache(maxsize=64)
def _table(name: str, stages: int, microbatches: int) -> Schedule | None:
    """The table, where it is made at once."""
    how = known(name)
    if stages * microbatches > SCHEDULES[name] or not how.holds(Shape(stages, microbatches)):
        return None
    try:
        return how.make(stages, microbatches)
    except ScheduleError:
        return None


def _seconds(found: Balanced) -> float:
    return found.timeline.makespan
