"""Schedules with several chunks per rank, placed in loops."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ..table.action import Action, ActionKind
from ..table.schedule import Schedule, looped
from .flush_schedules import backward, backward_input, backward_weight, forward, in_turn, require, require_counts


def _groups(ranks: int, microbatches: int) -> list[range]:
    """Split the microbatches into as many groups of at least p as possible, the larger ones first.

    Smaller groups would deadlock.
    """
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    ends = [n * size + min(n, larger) for n in range(count + 1)]
    return [range(a, b) for a, b in pairwise(ends)]


def _in_groups(groups: list[range], chunks: int, backwards: bool = False) -> list[tuple[int, int]]:
    """Return (microbatch, local chunk) depth first: a group's microbatches through one chunk, then the next."""
    order = range(chunks)[::-1] if backwards else range(chunks)
    return [(m, c) for group in groups for c in order for m in group]


def _numbers(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    require_counts(name, ranks, microbatches)
    require(name, chunks >= 1, f"{chunks} chunks per rank", "each rank needs a chunk", "pass chunks=2")


def interleaved_one_f_one_b(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B over several chunks per rank: a bubble of (p - 1)(F + B + W)/v (Narayanan et al., arXiv 2104.04473)."""
    name = "Interleaved 1F1B"
    _numbers(name, ranks, microbatches, chunks)
    groups = _groups(ranks, microbatches)
    forwards, backwards = (_in_groups(groups, chunks, b) for b in (False, True))

    def row(r: int) -> tuple[Action, ...]:
        warm = 2 * (ranks - 1 - r) + (chunks - 1) * len(groups[0])
        there, back = ([(m, c * ranks + r) for m, c in units] for units in (forwards, backwards))
        return tuple(in_turn(there, back, warm))

    return Schedule(name, looped(ranks, chunks), microbatches, tuple(map(row, range(ranks))))


def looped_bfs(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """All microbatches through one chunk, then through the next: sends overlap best (arXiv 2211.05953)."""
    name = "Looped BFS"
    _numbers(name, ranks, microbatches, chunks)

    def row(r: int) -> Iterator[Action]:
        own = range(r, chunks * ranks, ranks)
        yield from (forward(m, c) for c in own for m in range(microbatches))
        yield from (backward(m, c) for c in own[::-1] for m in range(microbatches))

    return Schedule(name, looped(ranks, chunks), microbatches, tuple(tuple(row(r)) for r in range(ranks)))


def interleaved_zero_bubble(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B, r weight gradients late and p - 1 - r forwards less ahead: a bubble of (p - 1)(F + B - W)/v."""
    name = "Interleaved zero bubble"
    _numbers(name, ranks, microbatches, chunks)
    groups = _groups(ranks, microbatches)
    forwards, backwards = (_in_groups(groups, chunks, b) for b in (False, True))

    def row(r: int) -> Iterator[Action]:
        there, back = ([(m, c * ranks + r) for m, c in units] for units in (forwards, backwards))
        late: list[Action] = []
        for action in in_turn(there, back, (ranks - 1 - r) + (chunks - 1) * len(groups[0])):
            if action.kind is ActionKind.FORWARD:
                yield action
                continue
            yield backward_input(action.microbatch, action.chunk)
            late.append(backward_weight(action.microbatch, action.chunk))
            if len(late) > r:
                yield late.pop(0)
        yield from late

    return Schedule(name, looped(ranks, chunks), microbatches, tuple(tuple(row(r)) for r in range(ranks)))
