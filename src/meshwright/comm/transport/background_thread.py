"""Background work: one thread that runs, in order, the work that the rank has begun and not waited for yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BackgroundWork:
    """Work of the thread that may not be finished."""

    done: Future[Tensor]

    def wait(self) -> Tensor:
        """Return the result, or raise the error of the work."""
        return self.done.result()


class BackgroundThread:
    """The background thread, started with the first work. The caller's own calls run after all work begun before."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._latest: Future[Tensor] | None = None
        self._identity = 0
        """Identity of the thread; 0 before it is started."""

    def begin(self, work: Callable[[], Tensor]) -> BackgroundWork:
        """Queue work for the thread, after all earlier work."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "meshwright side", self._note_identity)
        self._latest = self._thread.submit(_without_gradients, work)
        return BackgroundWork(self._latest)

    def drain(self) -> None:
        """Wait until all work is finished; returns at once in the thread itself."""
        if self._latest is None or self.is_here():
            return
        self._latest.exception()
        self._latest = None

    def is_busy(self) -> bool:
        """True if some work is not finished."""
        latest = self._latest
        return latest is not None and not latest.done()

    def is_here(self) -> bool:
        """True if the calling thread is the background thread."""
        return self._identity == threading.get_ident()

    def _note_identity(self) -> None:
        self._identity = threading.get_ident()


def _without_gradients(work: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return work()
