"""The record of decisions for `explain`."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from meshwright.layout import Spec

from ..conversion.convert import Move, move
from ..core.dist_tensor import PLANS


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call: its name, the specs of its operands, their conversions, and the specs of its results.

    `how` is the execution of the call: "local" on the parts; "ring" or "ulysses" for attention; smaller "operators" or
    "parts" that follow in the record; on "whole" tensors, for lack of a rule; or a "reshard" that the program asked
    for.
    """

    name: str
    ins: tuple[Spec, ...]
    moves: tuple[tuple[int, Move], ...]
    outs: tuple[Spec, ...]
    how: str


class DecisionLog(list[CallRecord]):
    """The decisions, in order."""

    def add_reshard(self, src: Spec, dst: Spec) -> None:
        """Add a conversion that the program asked for."""
        self.append(CallRecord("reshard", (src,), ((0, move(src, dst)),), (dst,), "reshard"))


class _State(threading.local):
    def __init__(self) -> None:
        self.record: DecisionLog | None = None


_state = _State()
_keepers: list[DecisionLog] = []
"""The records of all threads. While there is one, no plan is stored, since a stored plan is not decided again."""


def recording() -> bool:
    """True while any thread keeps a record."""
    return bool(_keepers)


def note(decided: CallRecord) -> None:
    """Add to this thread's record, if there is one."""
    if _state.record is not None:
        _state.record.append(decided)


@contextmanager
def decisions() -> Generator[DecisionLog]:
    """Yield the record of the calls that this thread makes inside the block, in order, with their decisions."""
    record = DecisionLog()
    before, _state.record = _state.record, record
    _keepers.append(record)
    PLANS.clear()
    try:
        yield record
    finally:
        _state.record = before
        _keepers[:] = [other for other in _keepers if other is not record]
