"""One thread of a rank at a time makes collectives.

Two threads may reach their collectives in another order on each rank. Equal collectives would then mix the values of
both threads, and a comparison of calls cannot tell. So a call that begins while a call of another thread runs is an
error, in both threads.
"""

from __future__ import annotations

import threading

from .._errors import CallError
from ..communicators.call import CommCall


class OneCaller:
    """The thread that makes a collective, if there is one."""

    def __init__(self) -> None:
        self._turn = threading.RLock()
        self._call: tuple[CommCall, str] | None = None
        self._error: CallError | None = None

    def begin(self, call: CommCall) -> None:
        """Take the turn for `call`. Raises CallError if another thread has it."""
        if not self._turn.acquire(blocking=False):
            raise self._refuse(call)
        self._call = call, threading.current_thread().name

    def end(self) -> None:
        """Give the turn back. Raises CallError if another thread has begun a call meanwhile."""
        error, self._error, self._call = self._error, None, None
        self._turn.release()
        if error is not None:
            raise error

    def _refuse(self, call: CommCall) -> CallError:
        first, name = self._call or ("another call", "another thread")
        self._error = CallError(
            f"{call} in the thread {threading.current_thread().name!r}",
            f"{first} in the thread {name!r} of this rank is not finished",
            "threads reach their collectives in any order, so ranks would mix the values of different threads",
            "make all calls on distributed tensors in one thread of each rank",
        )
        return self._error
