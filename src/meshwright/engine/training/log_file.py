"""The log of a run: one JSON object per line. A thread writes it, so a slow or dead file system delays no step."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from time import monotonic
from typing import IO, Any

from meshwright.checkpoint import write_seconds
from meshwright.layout import warn_user

from .._errors import TrainingError

_MOST_LINES = 10_000
"""Most lines that wait to be written; later ones are left out."""


@contextmanager
def log_file(path: Path) -> Generator[LogFile]:
    """Yield the log at a path, to which lines are appended.

    Raises:
        TrainingError: the file cannot be opened.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        why = "the log file must be open before the first step, because each step writes a line"
        raise TrainingError(f"the log {path}", f"{error.strerror}", why, "choose a folder that is writable") from error
    log = LogFile(opened)
    try:
        yield log
    finally:
        log.close()


class LogFile:
    """An open log; a call with an event appends its line. Lines that cannot be written are reported by warnings."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._lines = file, Queue[str | None](_MOST_LINES)
        self._error = ""
        self._thread = Thread(target=self._write, name="training log", daemon=True)
        self._thread.start()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Append an event. A number that is not finite becomes a string, because JSON has none."""
        self._warn()
        try:
            self._lines.put_nowait(json.dumps({k: _in_json(v) for k, v in event.items()}))
        except Full:
            self._error = "no answer from the file system"

    def close(self) -> None:
        """Wait until all lines are written, at most for the time limit of a file operation of a save."""
        self._warn()
        seconds = write_seconds()
        end = monotonic() + seconds
        with suppress(Full):
            self._lines.put(None, timeout=seconds)
        self._thread.join(max(end - monotonic(), 0))
        if self._thread.is_alive():
            self._error = f"no answer from the file system for {seconds:g} s"
        else:
            self._close_file()
        self._warn()

    def _close_file(self) -> None:
        """Close the file, which writes lines that an earlier error has left in its buffer."""
        try:
            self._file.close()
        except OSError as error:
            self._error = error.strerror or str(error)

    def _write(self) -> None:
        """Write lines until the end; a full disk does not end the run."""
        while (line := self._lines.get()) is not None:
            try:
                print(line, file=self._file)
            except OSError as error:
                self._error = error.strerror or str(error)

    def _warn(self) -> None:
        """Report an error of the thread once."""
        error, self._error = self._error, ""
        if error:
            warn_user(f"the log {self._file.name} misses a line: {error}", RuntimeWarning)


def _in_json(value: object) -> object:
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
