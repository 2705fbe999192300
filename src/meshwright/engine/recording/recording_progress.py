"""Progress of a recording on a terminal: the current phase, and at the end the seconds of each phase."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TextIO

from meshwright.comm import current_communicator
from meshwright.search import progress_bar

LEAST = 1.0
"""Recordings that take at least so many seconds are reported."""


@dataclass(slots=True)
class RecordingPhases:
    """The phases of the recording of `what`, with their seconds; rank 0 shows them if `file` is a terminal."""

    what: str
    file: TextIO | None = None
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Show the phase while the context lasts, and measure it."""
        begin = perf_counter()
        with progress_bar(f"{self.what}: {name}", current_communicator().rank != 0, self.file):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - begin

    def tell(self) -> None:
        """Print the seconds of each phase if they took long together."""
        out = self.file or sys.stderr
        if sum(self.seconds.values()) >= LEAST and current_communicator().rank == 0 and out.isatty():
            print(self.text(), file=out)

    def text(self) -> str:
        """Return one line: the seconds of all phases, the longest first.

        >>> RecordingPhases("train program of Net", None, {"capture": 1.5, "record": 2.25}).text()
        'train program of Net made in 3.8 s: record 2.2 s, capture 1.5 s'
        """
        longest = sorted(self.seconds.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in longest)
        return f"{self.what} made in {sum(self.seconds.values()):.1f} s: {parts}"
