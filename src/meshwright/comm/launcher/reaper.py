"""Ends the processes of a launcher that has died; run as a script, with the standard library only.

The launcher writes three things: the mark of its run, which is in the environment of all its processes; a line with the
process number of each rank; and "done" at its end. If its pipe closes without "done", it was killed. Then the marked
processes get SIGTERM, and SIGKILL three seconds later. This includes processes that are stopped, that hold Python's
interpreter lock, or whose parents have ended.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

GRACE = 3.0
DONE = "done"
_STARTED = 19
"""Index of the start time in /proc/PID/stat, counted from the state."""
_ROUNDS = 5
Family = dict[int, int]
"""Process number → start time. The start time distinguishes a process from a later one with the same number."""


def process_fields(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; an empty list if there is no such process."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def start_of(process: int) -> int:
    """Return the start time of a process; 0 if there is none, or if it has ended."""
    fields = process_fields(process)
    return int(fields[_STARTED]) if len(fields) > _STARTED and fields[0] not in "ZX" else 0


def marked(mark: str) -> Family:
    """Return this user's processes with `mark` in their environment; none without /proc."""
    found: Family = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdecimal() and int(entry) != os.getpid() and _has(int(entry), mark.encode()):
            found[int(entry)] = start_of(int(entry))
    return found


def end_marked(mark: str) -> None:
    """Kill the marked processes, and the processes that they start meanwhile."""
    for _ in range(_ROUNDS):
        family = {process: started for process, started in marked(mark).items() if started}
        if not family:
            return
        send_family(family, signal.SIGKILL)
        time.sleep(0.02)


def send_family(family: Family, number: int) -> None:
    """Send a signal to the processes that still exist."""
    for process, started in family.items():
        if started and start_of(process) == started:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)


def send_group(process: int, number: int) -> None:
    """Send a signal to the remaining processes of the group that `process` leads."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, number)


def _has(process: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            return mark in file.read()
    except OSError:
        return False


def _end(mark: str, started: Family) -> None:
    """End the processes of the run."""
    family = marked(mark) | started
    send_family(family, signal.SIGTERM)
    end = time.monotonic() + GRACE
    while time.monotonic() < end and any(begin and start_of(process) == begin for process, begin in family.items()):
        time.sleep(0.05)
    send_family(family, signal.SIGKILL)
    end_marked(mark)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    mark, started = sys.stdin.readline().strip(), Family()
    for line in sys.stdin:
        if line.strip() == DONE:
            return
        started[int(line)] = start_of(int(line))
    if mark:
        _end(mark, started)


if __name__ == "__main__":
    main()
