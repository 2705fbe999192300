"""Keeping a record of what was decided, for `explain`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from meshwright.layout import Spec

from ._convert import Move
from ._dist_tensor import PLANS


@dataclass(frozen=True, slots=True)
class Decided:
    """One call: its name, its operands' specs, what each must become and by which steps, and the results' specs."""

    name: str
    ins: tuple[Spec, ...]
    moves: tuple[tuple[int, Move], ...]
    outs: tuple[Spec, ...]
    how: str


class _State(threading.local):
    def __init__(self) -> None:
        self.record: list[Decided] | None = None


_state = _State()


def recording() -> bool:
    """True while this thread keeps a record."""
    return _state.record is not None


def note(decided: Decided) -> None:
    """Adds to the record, if one is kept."""
    if _state.record is not None:
        _state.record.append(decided)


@contextmanager
def decisions() -> Iterator[list[Decided]]:
    """The calls that this thread makes inside, in order, each with what was decided for it."""
    before, _state.record = _state.record, []
    PLANS.clear()
    try:
        yield _state.record
    finally:
        _state.record = before
        PLANS.clear()
