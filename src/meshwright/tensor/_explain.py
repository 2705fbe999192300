"""Keeping a record of what was decided, for `explain`."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from meshwright.layout import Spec

from ._convert import Move, move
from ._dist_tensor import PLANS


@dataclass(frozen=True, slots=True)
class Decided:
    """One call: its name, its operands' specs, what each must become and by which steps, and the results' specs.

    `how` it was carried out: "local" on the parts, attention also by "ring" or "ulysses" where that was asked for, as
    smaller "operators" or "parts" that follow in the record, on "whole" tensors for want of a rule, or as a "reshard"
    that the program asked for.
    """

    name: str
    ins: tuple[Spec, ...]
    moves: tuple[tuple[int, Move], ...]
    outs: tuple[Spec, ...]
    how: str


class Record(list[Decided]):
    """What was decided, in order."""

    def add_reshard(self, src: Spec, dst: Spec) -> None:
        """Notes a conversion that the program asked for."""
        self.append(Decided("reshard", (src,), ((0, move(src, dst)),), (dst,), "reshard"))


class _State(threading.local):
    def __init__(self) -> None:
        self.record: Record | None = None


_state = _State()
_keepers: list[Record] = []
"""The records of all threads: while any rank keeps one no plan is remembered, for a known plan is not decided again."""


def recording() -> bool:
    """True while any thread keeps a record."""
    return bool(_keepers)


def note(decided: Decided) -> None:
    """Adds to this thread's record, if it keeps one."""
    if _state.record is not None:
        _state.record.append(decided)


@contextmanager
def decisions() -> Generator[Record]:
    """The calls that this thread makes inside, in order, each with what was decided for it."""
    record = Record()
    before, _state.record = _state.record, record
    _keepers.append(record)
    PLANS.clear()
    try:
        yield record
    finally:
        _state.record = before
        _keepers[:] = [other for other in _keepers if other is not record]
