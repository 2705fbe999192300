"""A wish to end, told by SIGTERM: whoever trains finishes the step, saves, and ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

STOPPED = 128 + signal.SIGTERM
"""The exit code of a run that ended because it was asked to: 143."""
_wishes: list[int] = []


@contextmanager
def stop_signals() -> Generator[Callable[[], bool]]:
    """Inside, SIGTERM ends nothing: the function that this gives tells whether it came.

    Signals belong to the main thread. In another one, such as that of a simulated rank, the signals are those of a
    `stop_signals` around it, if there is one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: bool(_wishes)
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: _wishes.append(number))
    try:
        yield lambda: bool(_wishes)
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
        _wishes.clear()
