"""Settings that hold for a while, each rank's own."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from meshwright.comm import current

from ._dist_tensor import rank_or_none

Choice = TypeVar("Choice")


class PerRank(Generic[Choice]):
    """What the calling rank has chosen, else `usual`.

    It is kept by carrier, or by thread where there is none: a process's carrier is that of torch's backward threads
    too, which recompute checkpointed calls.
    """

    def __init__(self, usual: Choice) -> None:
        self._usual = usual
        self._chosen: WeakKeyDictionary[Any, Choice] = WeakKeyDictionary()

    def get(self) -> Choice:
        """Return the choice that holds now."""
        if not self._chosen:
            return self._usual
        if rank_or_none() is not None and current() in self._chosen:
            return self._chosen[current()]
        return self._chosen.get(threading.current_thread(), self._usual)

    @contextmanager
    def holding(self, choice: Choice) -> Generator[None]:
        """Inside, `choice` holds."""
        here = threading.current_thread() if rank_or_none() is None else current()
        before = self._chosen.get(here)
        self._chosen[here] = choice
        try:
            yield
        finally:
            self._chosen.pop(here)
            if before is not None:
                self._chosen[here] = before
