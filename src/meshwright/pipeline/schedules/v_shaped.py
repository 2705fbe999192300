"""Zero-bubble schedules whose chunks go down and up the ranks: in one V, or in several (Wave).

V-Half and V-Min repeat one building block every six units. The places of its four passes determine the lifetime of an
activation, and so the number of activations held (Qi et al., arXiv 2405.15362).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from math import inf

from .._errors import ScheduleError
from ..simulation.compaction import compacted
from ..simulation.list_scheduling import ActionOrder, list_schedule
from ..simulation.simulator import Times, simulate_schedule
from ..table.action import Action, ActionKind
from ..table.peak_memory import ChunkMemory, peaks
from ..table.schedule import Schedule, zigzag
from .flush_schedules import backward_input, backward_weight, forward, require, require_counts

PERIOD = 6
Block = tuple[int, int, int, int]
"""Times at which a rank runs the forwards of its first and second chunk, and the backwards of its second and first."""


def v_min(ranks: int, microbatches: int, times: Times | None = None) -> Schedule:
    """About a third of the activations of 1F1B, for a bubble that grows with m unless F = B = W."""
    wait = 2 if ranks % 3 == 0 else 0

    def block(r: int) -> Block:
        return r, 2 * ranks - 1 - r, 2 * ranks + wait + r, 4 * ranks + wait - 1 - r

    return _from_block("V-Min", ranks, microbatches, block, times)


def v_half(ranks: int, microbatches: int, times: Times | None = None) -> Schedule:
    """About half of the activations of 1F1B."""
    wait = 3 if ranks % 2 == 0 else 0

    def block(r: int) -> Block:
        return 2 * r, 3 * ranks - 2 - r, 3 * ranks - 1 + wait + 2 * r, 6 * ranks - 2 + wait - r

    table = _from_block("V-Half", ranks, microbatches, block, times)
    return _best([table, *_with_few_alive(table, times)], times)


def zb_v(ranks: int, microbatches: int, times: Times | None = None) -> Schedule:
    """The activations of 1F1B, and no bubble in the span where F = B = W (Qi et al., arXiv 2401.10241, section 6)."""
    require_counts("ZB-V", ranks, microbatches)
    rows = tuple(_Phases(r, ranks, microbatches).row() for r in range(ranks))
    schedule = Schedule("ZB-V", zigzag(ranks), microbatches, rows)
    return _best([schedule, compacted(schedule, times)], times)


def wave(ranks: int, microbatches: int, chunks: int = 4, times: Times | None = None) -> Schedule:
    """Chunks in several Vs, without messages at turns; holds at most p microbatches, as 1F1B (arXiv 2308.15762)."""
    require_counts("Wave", ranks, microbatches)
    require("Wave", chunks >= 1, f"{chunks} chunks per rank", "each rank needs a chunk", "pass chunks=4")
    backwards = [(ActionKind.BACKWARD_INPUT, place) for place in range(chunks)]
    forwards = [(ActionKind.FORWARD, place) for place in reversed(range(chunks))]
    way, most = zigzag(ranks, chunks)[0], (float(ranks * chunks),) * ranks
    rules = ([*backwards, *forwards], [*reversed(backwards), *forwards])
    found = [list_schedule("Wave", way, microbatches, rule, times or Times(), ChunkMemory(), most) for rule in rules]
    return _best(found, times)


class _Phases:
    """A rank's row of ZB-V; 0 is its chunk on the descending side of the V, 1 its chunk on the ascending side."""

    def __init__(self, rank: int, ranks: int, microbatches: int) -> None:
        self.rank, self.ranks, self.m = rank, ranks, microbatches
        self.chunks = rank, 2 * ranks - 1 - rank
        self.done: Counter[tuple[ActionKind, int]] = Counter()
        self.actions: list[Action] = []

    def put(self, text: str, times: int = 1) -> None:
        """Append actions such as "F0 B1", `times` times; actions of microbatches beyond the last one are left out."""
        for word in text.split() * times:
            kind, way = ActionKind(word[0]), int(word[1])
            if self.done[kind, way] < self.m:
                self.actions.append(Action(kind, self.done[kind, way], self.chunks[way]))
                self.done[kind, way] += 1

    def row(self) -> tuple[Action, ...]:
        """Return the row of the rank.

        It runs forwards until the first one comes back, backwards of chunk 1, all kinds in turn, then backwards of
        chunk 0.
        """
        behind = self.ranks - self.rank
        self.put("F0", 2 * behind - 1)
        self.put("F1 F0", self.rank)
        self.put("F1 B1 W1", behind)
        while (
            self.done[ActionKind.FORWARD, 1] < self.done[ActionKind.FORWARD, 0]
            or self.done[ActionKind.FORWARD, 0] < self.m
        ):
            self.put("F0 B0 W0 F1 B1 W1")
        self.put("B0 B1", self.rank)
        self.put("B0 W0", behind)
        self.put("W1", self.m)
        self.put("W0", self.m)
        return tuple(self.actions)


def _from_block(
    name: str, ranks: int, microbatches: int, block: Callable[[int], Block], times: Times | None
) -> Schedule:
    """Repeat the block for each microbatch; return the shortest of this table, its compaction, and list schedules.

    List scheduling uses the same memory.
    """
    require_counts(name, ranks, microbatches)
    rows = tuple(_row(r, 2 * ranks - 1 - r, block(r), microbatches) for r in range(ranks))
    schedule = Schedule(name, zigzag(ranks), microbatches, rows)
    most = max(peaks(schedule))
    found = [schedule, compacted(schedule, times, capacity=most)]
    for rule in _RULES:
        with suppress(ScheduleError):
            found.append(
                list_schedule(
                    name, zigzag(ranks)[0], microbatches, rule, times or Times(), ChunkMemory(), (most,) * ranks
                )
            )
    return _best(found, times)


_F0, _F1, _B0, _B1 = ((kind, way) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT) for way in (0, 1))
_RULES = ((_B0, _F1, _B1, _F0), (_B0, _F1, _F0, _B1), (_F1, _F0, _B1, _B0))
"""The orders, of all 24, that find the shortest schedules."""
_ALIVE = ((0.0, 0.25), (0.0, 0.3), (0.0, 0.4), (1.0, 0.25), (1.0, 0.4))
"""Numbers (a, b): the first chunk of rank r holds at most p + a - b r microbatches."""
_TRIED = 3
"""Number of list schedules of a long pipeline; a short one decides which."""


def _with_few_alive(table: Schedule, times: Times | None) -> list[Schedule]:
    """Return list schedules in the memory of a table of V-Half, whose first chunks hold few microbatches.

    Without the limit, forwards of the first chunk start early, and the memory that they take is missing for the second
    one. In the block, the activations of the first chunk of rank r live for about p - r / 2 periods. Limits and rules
    that make a short table of 2p microbatches short are used for a long one.
    """
    ranks, most = len(table.rows), max(peaks(table))
    found = [(rule, [max(1.0, ranks + a - b * r) for r in range(ranks)]) for rule in _RULES for a, b in _ALIVE]

    def made(microbatches: int, rule: ActionOrder, alive: list[float]) -> Schedule | None:
        with suppress(ScheduleError):
            return list_schedule(
                table.name, table.ways[0], microbatches, rule, times or Times(), ChunkMemory(), (most,) * ranks, alive
            )
        return None

    def short_cost(each: tuple[ActionOrder, list[float]]) -> tuple[float, float]:
        short = made(2 * ranks, *each)
        return (inf, inf) if short is None else _cost(short, times)

    if table.microbatches > 2 * ranks:
        found = sorted(found, key=short_cost)[:_TRIED]
    return [schedule for each in found if (schedule := made(table.microbatches, *each)) is not None]


def _best(found: list[Schedule], times: Times | None) -> Schedule:
    return min(found, key=lambda s: _cost(s, times))


def _cost(schedule: Schedule, times: Times | None) -> tuple[float, float]:
    line = simulate_schedule(schedule, times)
    return line.makespan, line.span


def _row(first: int, second: int, block: Block, microbatches: int) -> tuple[Action, ...]:
    """Return a rank's forwards and backwards at their times, with weight gradients in the units between."""
    passes = [(forward, first), (forward, second), (backward_input, second), (backward_input, first)]
    at = {
        start + PERIOD * m: make(m, c)
        for (make, c), start in zip(passes, block, strict=True)
        for m in range(microbatches)
    }
    row: list[Action] = []
    late: list[Action] = []
    for unit in range(max(at) + 1):
        if (action := at.get(unit)) is not None:
            row.append(action)
            if action.kind == "B":
                late.append(backward_weight(action.microbatch, action.chunk))
        elif late:
            row.append(late.pop(0))
    return (*row, *late)
