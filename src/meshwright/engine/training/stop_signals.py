"""Stop a run by SIGTERM: the training loop finishes its step, saves, and ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

STOPPED = 128 + signal.SIGTERM
"""The exit code of a run that ended because it was asked to: 143."""
_stop_requests: list[int] = []


@contextmanager
def stop_signals() -> Generator[Callable[[], bool]]:
    """Catch SIGTERM inside the block; the yielded function returns True once it has come.

    Signals belong to the main thread. In another thread, such as that of a simulated rank, the function reports the
    signals of a `stop_signals` block of the main thread around it, if there is one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: bool(_stop_requests)
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: _stop_requests.append(number))
    try:
        yield lambda: bool(_stop_requests)
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
        _stop_requests.clear()
