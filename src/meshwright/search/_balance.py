"""Layers shared out over the stages of a pipeline, and the schedule that takes least time for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import inf

from meshwright.pipeline import Schedule, ScheduleError, Shape, Timeline, known, peaks, simulate

from ._layer_costs import LayerCosts

FIRST = "1F1B"
SCHEDULES = {FIRST: 2**14, "ZB-H1": 2**11, "ZB-1p": 2**8, "ZB-2p": 2**8}
"""Schedules of one chunk per stage → the stages times microbatches up to which their tables are made at once."""
SMALL = 2**6
"""Stages times microbatches up to which all schedules are run wherever stages may begin."""
SHORTER = 1e-6
"""What takes less by this part is no shorter."""

Message = Callable[[float], float]
Starts = tuple[int, ...]


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

    First the layers are shared out so that the stage that ends last in a closed form ends first: it begins behind the
    forwards of those before it, works, and leaves them their backwards. Then starts are moved while tables that run
    take less.
    """
    starts = share_out(layers, stages, microbatches, room)
    if starts is None:
        return None
    names = tuple(SCHEDULES) if stages * microbatches <= SMALL else (FIRST,)
    best = _fastest(layers, starts, microbatches, room, message, names)
    while best is not None and stages * microbatches <= SCHEDULES["ZB-H1"]:
        near = (_fastest(layers, s, microbatches, room, message, names) for s in _moved(best.starts, layers))
        shorter = min(filter(None, near), key=_seconds, default=best)
        if not _seconds(shorter) < _seconds(best) * (1 - SHORTER):
            break
        best = shorter
    return None if best is None else _fastest(layers, best.starts, microbatches, room, message, tuple(SCHEDULES))


def share_out(layers: LayerCosts, stages: int, microbatches: int, room: float) -> Starts | None:
    """The layers at which stages begin, by dynamic programming over (stages, layers): 1F1B's form, and its memory."""
    count = len(layers.whole)
    work, static, held = (_sums(numbers) for numbers in (layers.whole, layers.static, layers.held))
    gradients = _sums(tuple(map(sum, zip(layers.forward, layers.backward, strict=True))))

    def takes(a: int, b: int, stage: int) -> float:
        """Seconds of a stage of the layers from a to b, and of what comes before its first and behind its last."""
        came = layers.sent[a - 1] if a else 0.0
        alive = min(microbatches, stages - stage)
        nbytes = static[b] - static[a] + max(layers.brief[a:b]) + alive * (held[b] - held[a] + came)
        return inf if nbytes > room else gradients[a] + microbatches * (work[b] - work[a])

    best = {0: (0.0, Starts())}
    for stage in range(stages):
        ends = range(stage + 1, count - (stages - stage - 1) + 1) if stage < stages - 1 else (count,)
        best = {b: min(_longer(best, takes, stage, b), default=(inf, Starts())) for b in ends}
    value, starts = best[count]
    return None if value == inf else starts[1:]


def _longer(
    best: dict[int, tuple[float, Starts]], takes: Callable[[int, int, int], float], stage: int, end: int
) -> Iterator[tuple[float, Starts]]:
    """All ways to end a stage before a layer."""
    for a, (value, starts) in best.items():
        if a < end and value < inf:
            yield max(value, takes(a, end, stage)), (*starts, a)


def _moved(starts: Starts, layers: LayerCosts) -> Iterator[Starts]:
    """The same with one start a layer earlier or later."""
    for n, start in enumerate(starts):
        for other in (start - 1, start + 1):
            moved = (*starts[:n], other, *starts[n + 1 :])
            if all(a < b for a, b in pairwise((0, *moved, len(layers.whole)))):
                yield moved


def _fastest(
    layers: LayerCosts, starts: Starts, microbatches: int, room: float, message: Message, names: tuple[str, ...]
) -> Balanced | None:
    """The schedule of least time that fits; of those alike the first."""
    costs = layers.stages(starts)
    times, memory, count = costs.times(message), costs.memory, len(starts) + 1
    tables = (table for name in names if (table := _table(name, count, microbatches)) is not None)
    fitting = [table for table in tables if max(peaks(table, memory)) <= room]
    found = [Balanced(starts, costs, simulate(table, times)) for table in fitting]
    least = min(map(_seconds, found), default=0.0)
    return next((b for b in found if _seconds(b) <= least * (1 + SHORTER)), None)


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


def _sums(numbers: tuple[float, ...]) -> tuple[float, ...]:
    return (0.0, *accumulate(numbers))
