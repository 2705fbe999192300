"""Asynchronous schedules: no flush, and weights that change while microbatches are on their way.

They are not what the optimizer means on one device: `check` refuses them without `stale=True`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ._action import Action, Kind
from ._flush import asked, one_f_one_b
from ._schedule import Schedule


def pipedream(ranks: int, microbatches: int) -> Schedule:
    """1F1B with an update behind every backward; rank r keeps p - r versions of its weights (arXiv 1806.03377)."""
    plain = one_f_one_b(ranks, microbatches)
    rows = tuple(tuple(_updated(row, range(microbatches))) for row in plain.rows)
    return replace(plain, name="PipeDream", rows=rows)


def pipedream_2bw(ranks: int, microbatches: int, group: int | None = None) -> Schedule:
    """1F1B with an update behind `group` backwards (default: p), for weights one update old (arXiv 2006.09503)."""
    plain, group = one_f_one_b(ranks, microbatches), group or ranks
    asked(
        "PipeDream-2BW", group >= ranks and microbatches % group == 0,
        f"{microbatches} microbatches in groups of {group} on {ranks} ranks",
        "a group fills the pipeline, and is whole", f"group={ranks}, and a multiple of it as microbatches",
    )  # fmt: skip
    rows = tuple(tuple(_updated(row, range(group - 1, microbatches, group))) for row in plain.rows)
    versions = tuple(max(0, m // group - 1) for m in range(microbatches))
    return replace(plain, name="PipeDream-2BW", rows=rows, versions=versions)


def _updated(row: tuple[Action, ...], behind: range) -> Iterator[Action]:
    for action in row:
        yield action
        if action.kind is Kind.BACKWARD and action.microbatch in behind:
            yield Action(Kind.OPTIMIZER, action.microbatch)


def weight_versions(schedule: Schedule) -> tuple[int, ...]:
    """The most versions of its weights that each rank holds at one time.

    >>> weight_versions(pipedream(4, 8)), weight_versions(pipedream_2bw(4, 8)), weight_versions(one_f_one_b(4, 8))
    ((4, 3, 2, 1), (2, 2, 2, 2), (1, 1, 1, 1))
    """
    return tuple(_versions(schedule, row) for row in schedule.rows)


def _versions(schedule: Schedule, row: tuple[Action, ...]) -> int:
    """A version is held while it is the newest, or while a microbatch that used it, or will, is not done."""
    updates, most = 0, 1
    waiting: dict[int, int] = {}
    for atom in (atom for action in row for atom in action.atoms):
        if atom.kind is Kind.FORWARD:
            waiting[atom.microbatch] = schedule.versions[atom.microbatch] if schedule.versions else updates
        elif atom.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            waiting.pop(atom.microbatch, None)
        updates += atom.kind is Kind.OPTIMIZER
        most = max(most, len({updates, *waiting.values()}))
    return most
