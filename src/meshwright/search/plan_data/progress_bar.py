"""Progress bar on a terminal, for work that takes longer than a second."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from threading import Lock, Timer
from typing import TextIO

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

OnProgress = Callable[[int, int], None]
"""Function that is called with the number of steps done and the number of all steps."""
PATIENCE = 1.0
"""Seconds before a bar is shown."""


@contextmanager
def progress_bar(
    what: str, silent: bool = False, file: TextIO | None = None, patience: float = PATIENCE
) -> Generator[OnProgress]:
    """Show a bar on the standard error until the end of the block; yield the function to call on progress.

    Nothing is shown if `silent` is set, or if the output is not a terminal.
    """
    out = file or sys.stderr
    if silent or not out.isatty():
        yield lambda done, of: None
        return
    bar = _Bar(what, Console(file=out))
    timer = Timer(patience, bar.begin)
    timer.daemon = True
    timer.start()
    try:
        yield bar.on_step
    finally:
        timer.cancel()
        bar.end()


class _Bar:
    """A bar that starts late, from another thread, or never."""

    def __init__(self, what: str, console: Console) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task(what, total=None)
        self._lock, self._ended = Lock(), False

    def begin(self) -> None:
        with self._lock, suppress(LiveError):  # another live display is on this terminal already
            if not self._ended:
                self._bar.start()

    def on_step(self, done: int, of: int) -> None:
        self._bar.update(self._task, completed=done, total=of)

    def end(self) -> None:
        with self._lock:
            self._ended = True
            self._bar.stop()
