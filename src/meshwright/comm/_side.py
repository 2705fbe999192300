"""Work on the side: one thread that carries out, in order, what the rank has begun and not waited for yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pending:
    """Something that the thread will have done."""

    done: Future[Tensor]

    def wait(self) -> Tensor:
        """The result, or the error that came instead."""
        return self.done.result()


class Side:
    """The thread is there from the first work on; what the caller does itself comes behind all that was begun."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._latest: Future[Tensor] | None = None
        self._name = f"meshwright side {id(self)}"

    def begin(self, work: Callable[[], Tensor]) -> Pending:
        """Work for the thread, behind all that was begun before."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, self._name)
        self._latest = self._thread.submit(_without_gradients, work)
        return Pending(self._latest)

    def drain(self) -> None:
        """Returns once everything that was begun is done; the thread itself does not wait."""
        if self._latest is None or self.is_here():
            return
        self._latest.exception()
        self._latest = None

    def is_busy(self) -> bool:
        """Whether something that was begun is not done."""
        latest = self._latest
        return latest is not None and not latest.done()

    def is_here(self) -> bool:
        """Whether it is the thread that asks."""
        return threading.current_thread().name.startswith(self._name)


def _without_gradients(work: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return work()
