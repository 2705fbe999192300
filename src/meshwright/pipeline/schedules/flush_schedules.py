"""Schedules with one chunk per rank and an unsplit backward, which flush the pipeline before the update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .._errors import ScheduleError
from ..table.action import Action, ActionKind
from ..table.schedule import Schedule, linear


def forward(microbatch: int, chunk: int) -> Action:
    return Action(ActionKind.FORWARD, microbatch, chunk)


def backward(microbatch: int, chunk: int) -> Action:
    return Action(ActionKind.BACKWARD, microbatch, chunk)


def backward_input(microbatch: int, chunk: int) -> Action:
    return Action(ActionKind.BACKWARD_INPUT, microbatch, chunk)


def backward_weight(microbatch: int, chunk: int) -> Action:
    return Action(ActionKind.BACKWARD_WEIGHT, microbatch, chunk)


def require(name: str, possible: bool, found: str, why: str, write: str) -> None:
    """Raise ScheduleError unless `possible`."""
    if not possible:
        raise ScheduleError(f"schedule {name!r}", found, why, write)


def require_counts(name: str, ranks: int, microbatches: int) -> None:
    """Raise ScheduleError if the number of ranks or of microbatches is below one."""
    require(
        name,
        ranks >= 1 and microbatches >= 1,
        f"{ranks} ranks, {microbatches} microbatches",
        "a pipeline needs at least one rank and one microbatch",
        "use numbers from 1 on",
    )


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards: (m + p - 1)(F + B + W), m microbatches held (GPipe, arXiv 1811.06965)."""
    require_counts("GPipe", ranks, microbatches)
    rows = (
        (*(forward(m, r) for m in range(microbatches)), *(backward(m, r) for m in range(microbatches)))
        for r in range(ranks)
    )
    return Schedule("GPipe", linear(ranks), microbatches, tuple(rows))


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """One forward, one backward in turn: GPipe's time, p - r microbatches held on rank r (PipeDream-Flush, DAPPLE)."""
    require_counts("1F1B", ranks, microbatches)
    return Schedule("1F1B", linear(ranks), microbatches, tuple(_alternating(ranks, microbatches, 1)))


def eager_one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B with 2(p - r) - 1 microbatches held on rank r, which leaves messages time to travel (arXiv 2211.05322)."""
    require_counts("Eager 1F1B", ranks, microbatches)
    return Schedule("Eager 1F1B", linear(ranks), microbatches, tuple(_alternating(ranks, microbatches, 2)))


def _alternating(ranks: int, microbatches: int, ahead: int) -> Iterator[tuple[Action, ...]]:
    for r in range(ranks):
        units = [(m, r) for m in range(microbatches)]
        yield tuple(in_turn(units, units, ahead * (ranks - 1 - r)))


def in_turn(forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], warm: int) -> Iterable[Action]:
    """Yield `warm` forwards, then a forward and a backward in turn, then the remaining backwards."""
    warm = min(warm, len(forwards))
    for unit in forwards[:warm]:
        yield forward(*unit)
    for ahead, behind in zip(forwards[warm:], backwards, strict=False):
        yield forward(*ahead)
        yield backward(*behind)
    for unit in backwards[len(forwards) - warm :]:
        yield backward(*unit)
