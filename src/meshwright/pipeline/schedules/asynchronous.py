"""Asynchronous schedules: PipeDream and PipeDream-2BW, which update weights while microbatches are in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..table.action import Action, ActionKind
from ..table.schedule import Schedule
from .flush_schedules import one_f_one_b, require


def pipedream(ranks: int, microbatches: int) -> Schedule:
    """1F1B with an update after every backward; rank r keeps p - r versions of its weights (arXiv 1806.03377)."""
    plain = one_f_one_b(ranks, microbatches)
    rows = tuple(tuple(_updated(row, range(microbatches))) for row in plain.rows)
    return replace(plain, name="PipeDream", rows=rows)


def pipedream_2bw(ranks: int, microbatches: int, group: int | None = None) -> Schedule:
    """1F1B with an update after `group` backwards (default: p), for weights one update old (arXiv 2006.09503)."""
    plain, group = one_f_one_b(ranks, microbatches), group or ranks
    require(
        "PipeDream-2BW",
        group >= ranks and microbatches % group == 0,
        f"{microbatches} microbatches in groups of {group} on {ranks} ranks",
        "a group must be complete and fill the pipeline",
        f"use group={ranks}, and a multiple of it as microbatches",
    )
    rows = tuple(tuple(_updated(row, range(group - 1, microbatches, group))) for row in plain.rows)
    versions = tuple(max(0, m // group - 1) for m in range(microbatches))
    return replace(plain, name="PipeDream-2BW", rows=rows, versions=versions)


def _updated(row: tuple[Action, ...], behind: range) -> Iterator[Action]:
    for action in row:
        yield action
        if action.kind is ActionKind.BACKWARD and action.microbatch in behind:
            yield Action(ActionKind.OPTIMIZER, action.microbatch)
