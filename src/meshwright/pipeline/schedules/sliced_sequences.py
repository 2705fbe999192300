"""Schedules with slices of sequences.

The forward of a slice needs the slices before it, its backward the slices after it.
"""

from __future__ import annotations

from ..table.schedule import Schedule, linear
from .flush_schedules import backward, forward, in_turn, require, require_counts

Units = list[tuple[int, int]]


def _units(name: str, ranks: int, microbatches: int, slices: int) -> tuple[list[int], list[int]]:
    """Return the slices in the order of their forwards and of their backwards.

    Slice s of sequence m is m * slices + s.
    """
    require_counts(name, ranks, microbatches)
    require(name, slices >= 1, f"{slices} slices", "a sequence needs at least one slice", "pass slices=4")
    forwards = list(range(microbatches * slices))
    return forwards, [m + s for m in forwards[::slices] for s in range(slices)[::-1]]


def seq_one_f_one_b(ranks: int, microbatches: int, slices: int = 2) -> Schedule:
    """1F1B over slices of sequences: p - r + slices - 1 slices held on rank r (Sun et al., arXiv 2406.03488)."""
    name = "Seq1F1B"
    forwards, backwards = _units(name, ranks, microbatches, slices)
    rows = (
        tuple(in_turn([(u, r) for u in forwards], [(u, r) for u in backwards], ranks - r - 2 + slices))
        for r in range(ranks)
    )
    return Schedule(name, linear(ranks), microbatches * slices, tuple(rows), slices=slices)


def terapipe(ranks: int, microbatches: int, slices: int = 2) -> Schedule:
    """GPipe over slices of sequences: a bubble of (p - 1)(F + B + W)/slices (Li et al., arXiv 2102.07988)."""
    name = "TeraPipe"
    forwards, backwards = _units(name, ranks, microbatches, slices)
    rows = ((*(forward(u, r) for u in forwards), *(backward(u, r) for u in backwards)) for r in range(ranks))
    return Schedule(name, linear(ranks), microbatches * slices, tuple(rows), slices=slices)
