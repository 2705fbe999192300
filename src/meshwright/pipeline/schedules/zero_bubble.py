"""Schedules that put the gradients of weights where a rank would wait (Qi et al., arXiv 2401.10241)."""

from __future__ import annotations

from collections.abc import Iterator

from ..table.action import Action
from ..table.schedule import Schedule, linear
from .flush_schedules import backward_input, backward_weight, forward, require_counts


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with weight gradients late: a bubble of (p - 1)(F + B - W), p microbatches held."""
    return _handcrafted("ZB-H1", ranks, microbatches, 1)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """As ZB-H1, with up to 2p - 1 microbatches held: a bubble of (p - 1)(F + B - 2W), none where F = B = W."""
    return _handcrafted("ZB-H2", ranks, microbatches, 2)


def _handcrafted(name: str, ranks: int, microbatches: int, ahead: int) -> Schedule:
    """Return 1F1B with `ahead * (p - 1 - r)` forwards ahead on rank r, and `ahead * r` weight gradients late."""
    require_counts(name, ranks, microbatches)

    def row(r: int) -> Iterator[Action]:
        warm, late = min(ahead * (ranks - 1 - r), microbatches), ahead * r
        yield from (forward(m, r) for m in range(warm))
        for m in range(microbatches):
            if m + warm < microbatches:
                yield forward(m + warm, r)
            yield backward_input(m, r)
            if m >= late:
                yield backward_weight(m - late, r)
        yield from (backward_weight(m, r) for m in range(max(0, microbatches - late), microbatches))

    return Schedule(name, linear(ranks), microbatches, tuple(tuple(row(r)) for r in range(ranks)))
