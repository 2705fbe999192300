"""Schedules to start a search from: all known ones that fit, plain and squeezed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import inf

from meshwright.pipeline import (
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
    compacted,
    dualpipe_v,
    eager_one_f_one_b,
    gpipe,
    interleaved_one_f_one_b,
    interleaved_zero_bubble,
    linear,
    looped,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    wave,
    whole_backward,
    zb_h1,
    zb_h2,
    zb_v,
    zero_bubble,
    zigzag,
)

from .problem import Problem


def hints(problem: Problem) -> Iterator[Schedule]:
    """Yield every known schedule that the problem allows, then each squeezed."""
    tables = list(known_tables(problem))
    yield from tables
    yield from squeezed_tables(problem, tables)


def squeezed_tables(problem: Problem, tables: Iterable[Schedule]) -> Iterator[Schedule]:
    """Yield the tables squeezed for the times and the memory of the problem, where it allows them."""
    for table in tables:
        yield from filter(problem.allows, [compacted(table, problem.times, problem.memory, problem.microbatch_limits)])


def known_tables(problem: Problem) -> Iterator[Schedule]:
    """Yield the known schedules for the ranks and microbatches of a problem that it allows."""
    groups = range(1, min(problem.ranks, problem.microbatches) + 1)
    for make in (*_makers(problem), *(lambda g=g: in_groups(problem, g) for g in groups)):
        try:
            plain = make()
        except ScheduleError:
            continue
        whole = whole_backward(plain)
        yield from filter(problem.allows, map(_one_action_at_a_time, [plain, whole] if problem.split else [whole]))


def _one_action_at_a_time(table: Schedule) -> Schedule:
    """Return the same table with one action at a time."""
    return replace(table, rows=tuple(tuple(atom for action in row for atom in action.atoms) for row in table.rows))


def _makers(problem: Problem) -> list[Callable[[], Schedule]]:
    p, m, way, v = problem.ranks, problem.microbatches, problem.way, len(problem.way) // problem.ranks
    if (way,) == linear(p):
        return _linear_makers(problem)
    if (way,) == looped(p, v):
        makes = (interleaved_one_f_one_b, looped_bfs, interleaved_zero_bubble)
        return [lambda make=make: make(p, m, v) for make in makes]
    if (way,) == zigzag(p):
        makes = (zb_v, v_half, v_min)
        return [*(lambda make=make: make(p, m, problem.times) for make in makes), lambda: dualpipe_v(p, m)]
    if (way,) == zigzag(p, v):
        return [lambda: wave(p, m, v, problem.times)]
    return []


def _linear_makers(problem: Problem) -> list[Callable[[], Schedule]]:
    p, m = problem.ranks, problem.microbatches
    caps = sorted({limit for limit in problem.microbatch_limits if limit != inf} | {float(p), 2.0 * p})
    return [
        *(lambda make=make: make(p, m) for make in (gpipe, one_f_one_b, eager_one_f_one_b, zb_h1, zb_h2)),
        *(lambda c=c: zero_bubble("ZB", p, m, c, problem.times, problem.memory) for c in caps),
    ]


def in_groups(problem: Problem, size: int) -> Schedule:
    """Return the schedule that runs groups of `size` microbatches one after the other.

    Groups of one microbatch need the least memory of all schedules.
    """
    rows: list[list[Action]] = [[] for _ in range(problem.ranks)]
    for first in range(0, problem.microbatches, size):
        group = range(first, min(first + size, problem.microbatches))
        for c, rank in enumerate(problem.way):
            rows[rank] += [Action(ActionKind.FORWARD, m, c) for m in group]
        for c, rank in reversed(list(enumerate(problem.way))):
            kinds = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
            rows[rank] += [Action(kind, m, c) for m in group for kind in kinds]
    return Schedule(f"groups of {size}", (problem.way,), problem.microbatches, tuple(map(tuple, rows)))
