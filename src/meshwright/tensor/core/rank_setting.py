"""Settings in a context, separate for each rank."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from meshwright.comm import current_communicator

from .dist_tensor import rank_or_none

Choice = TypeVar("Choice")


class PerRank(Generic[Choice]):
    """The choice of the calling rank, or `usual` if it has made none.

    It is stored by communicator, or by thread if there is none. A process has the same communicator in torch's backward
    threads, which recompute checkpointed calls.
    """

    def __init__(self, usual: Choice) -> None:
        self._usual = usual
        self._chosen: WeakKeyDictionary[object, Choice] = WeakKeyDictionary()

    def get(self) -> Choice:
        """Return the current choice."""
        if not self._chosen:
            return self._usual
        if rank_or_none() is not None and current_communicator() in self._chosen:
            return self._chosen[current_communicator()]
        return self._chosen.get(threading.current_thread(), self._usual)

    @contextmanager
    def holding(self, choice: Choice) -> Generator[None]:
        """Set `choice` inside the block."""
        here = threading.current_thread() if rank_or_none() is None else current_communicator()
        before = self._chosen.get(here)
        self._chosen[here] = choice
        try:
            yield
        finally:
            self._chosen.pop(here)
            if before is not None:
                self._chosen[here] = before
