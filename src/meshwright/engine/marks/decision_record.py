"""The record that `explain` keeps on this rank, if it keeps one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from meshwright.layout import Spec
from meshwright.tensor import CallRecord, decisions


class _State(threading.local):
    def __init__(self) -> None:
        self.add_reshard: Callable[[Spec, Spec], None] | None = None


_state = _State()


@contextmanager
def record() -> Generator[list[CallRecord]]:
    """Collect the decisions on this rank inside the block: those for each call, and the program's own reshards."""
    with decisions() as found:
        before, _state.add_reshard = _state.add_reshard, found.add_reshard
        try:
            yield found
        finally:
            _state.add_reshard = before


def note_reshard(src: Spec, dst: Spec) -> None:
    """Add a conversion that the program asked for to the record, if one is kept."""
    if _state.add_reshard is not None:
        _state.add_reshard(src, dst)
