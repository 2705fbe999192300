"""Whether a process is there, and whether it runs: answers of the system, for which the process itself does nothing.

A process that holds Python's interpreter lock answers no question, and neither does one that is stopped. The system
tells them apart, for processes of one host and one namespace.
"""

from __future__ import annotations

import os
from contextlib import suppress
from enum import Enum
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ._reaper import process_fields

_STARTED = 19
"""Where the time of the start is in /proc/PID/stat, counted from the state."""


class Life(Enum):
    """What the system says of a process."""

    RUNNING = "running"
    STOPPED = "stopped"
    TRACED = "stopped by a debugger"
    GONE = "gone"
    UNKNOWN = "on another host, or on a system without /proc"


_STATES = {"T": Life.STOPPED, "t": Life.TRACED, "Z": Life.GONE, "X": Life.GONE, "x": Life.GONE}


class Identity(NamedTuple):
    """One process among all: the system that runs it, its number there, and when it started."""

    system: str
    process: int
    started: int

    @property
    def life(self) -> Life:
        """The state of the process; a later process with the same number is another one."""
        if not self.system or self.system != _system():
            return Life.UNKNOWN
        found = _read(self.process)
        if found is None or found[1] != self.started:
            return Life.GONE
        return _STATES.get(found[0], Life.RUNNING)


def own_identity() -> Identity:
    """Return the identity of this process."""
    found = _read(os.getpid())
    return Identity("", os.getpid(), 0) if found is None else Identity(_system(), os.getpid(), found[1])


@cache
def _system() -> str:
    """Return what is equal for two processes that see each other in /proc; "" without /proc."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _read(process: int) -> tuple[str, int] | None:
    """Return the state of a process and when it started; None if there is no such process."""
    fields = process_fields(process)
    return (fields[0], int(fields[_STARTED])) if len(fields) > _STARTED else None
