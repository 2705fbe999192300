"""Schedules to start from: all the known ones that fit, as they are and squeezed for the times at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshwright.pipeline import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    eager_one_f_one_b,
    gpipe,
    interleaved_one_f_one_b,
    interleaved_zero_bubble,
    linear,
    looped,
    looped_bfs,
    one_f_one_b,
    squeezed,
    v_half,
    v_min,
    whole_backward,
    zb_h1,
    zb_h2,
    zb_v,
    zero_bubble,
    zigzag,
)

from ._problem import Problem


def hints(problem: Problem) -> Iterator[Schedule]:
    """Every schedule that is known to keep to the placement and the memory."""
    for make in (*_makers(problem), lambda: one_by_one(problem)):
        try:
            plain = make()
        except ScheduleError:
            continue
        tables = [plain, whole_backward(plain)] if problem.split else [whole_backward(plain)]
        for table in tables:
            for schedule in (table, *_squeezed(problem, table)):
                if problem.allows(schedule):
                    yield schedule


def _squeezed(problem: Problem, table: Schedule) -> Iterator[Schedule]:
    if problem.allows(table):
        yield squeezed(table, problem.times, problem.memory, problem.limits)


def _makers(problem: Problem) -> list[Callable[[], Schedule]]:
    p, m, way, v = problem.ranks, problem.microbatches, problem.way, len(problem.way) // problem.ranks
    if (way,) == linear(p):
        caps = sorted({limit for limit in problem.limits if limit != float("inf")} | {float(p), 2.0 * p})
        return [
            *(lambda make=make: make(p, m) for make in (gpipe, one_f_one_b, eager_one_f_one_b, zb_h1, zb_h2)),
            *(lambda c=c: zero_bubble("ZB", p, m, c, problem.times, problem.memory) for c in caps),
        ]
    if (way,) == looped(p, v):
        makes = (interleaved_one_f_one_b, looped_bfs, interleaved_zero_bubble)
        return [lambda make=make: make(p, m, v) for make in makes]
    if (way,) == zigzag(p):
        return [lambda make=make: make(p, m, problem.times) for make in (zb_v, v_half, v_min)]
    return []


def one_by_one(problem: Problem) -> Schedule:
    """One microbatch after the other: it needs the least memory of all."""
    rows: list[list[Action]] = [[] for _ in range(problem.ranks)]
    for m in range(problem.microbatches):
        for c, rank in enumerate(problem.way):
            rows[rank].append(Action(Kind.FORWARD, m, c))
        for c, rank in reversed(list(enumerate(problem.way))):
            rows[rank] += [Action(Kind.BACKWARD_INPUT, m, c), Action(Kind.BACKWARD_WEIGHT, m, c)]
    return Schedule("one by one", (problem.way,), problem.microbatches, tuple(map(tuple, rows)))
