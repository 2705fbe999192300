"""State of a process as the operating system reports it, without help of the process.

A process that holds Python's interpreter lock answers no question, and neither does a stopped process. The system
distinguishes them, for processes of one host and one namespace.
"""

from __future__ import annotations

import os
from contextlib import suppress
from enum import Enum
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .reaper import process_fields

_STARTED = 19
"""Index of the start time in /proc/PID/stat, counted from the state."""


class ProcessState(Enum):
    """State of a process as the system reports it."""

    RUNNING = "running"
    STOPPED = "stopped"
    TRACED = "stopped by a debugger"
    GONE = "gone"
    UNKNOWN = "on another host, or on a system without /proc"


_STATES = {
    "T": ProcessState.STOPPED,
    "t": ProcessState.TRACED,
    "Z": ProcessState.GONE,
    "X": ProcessState.GONE,
    "x": ProcessState.GONE,
}


class ProcessIdentity(NamedTuple):
    """Unique identity of a process: its system, its process number, and its start time."""

    system: str
    process: int
    started: int

    @property
    def life(self) -> ProcessState:
        """Return the state of the process; a later process with the same number counts as another one."""
        if not self.system or self.system != _system():
            return ProcessState.UNKNOWN
        found = _read(self.process)
        if found is None or found[1] != self.started:
            return ProcessState.GONE
        return _STATES.get(found[0], ProcessState.RUNNING)


def own_identity() -> ProcessIdentity:
    """Return the identity of this process."""
    found = _read(os.getpid())
    return ProcessIdentity("", os.getpid(), 0) if found is None else ProcessIdentity(_system(), os.getpid(), found[1])


@cache
def _system() -> str:
    """Return a text that is equal for two processes that see each other in /proc; "" without /proc."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _read(process: int) -> tuple[str, int] | None:
    """Return the state and the start time of a process; None if there is no such process."""
    fields = process_fields(process)
    return (fields[0], int(fields[_STARTED])) if len(fields) > _STARTED else None
