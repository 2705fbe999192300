"""The state of a rank, as a value that ranks send to each other."""

from __future__ import annotations

from typing import Any, NamedTuple, cast


class RankState(NamedTuple):
    """State of a rank: its current call, the ranks that it waits for, and the number of its calls.

    With background conversions a rank may be in two calls, or compute while it is in a call. It is `stuck` if all its
    threads wait and none of its messages is in flight. It is `debugged` while a debugger has stopped it. `silence` is
    the reason why the rank does not answer; it is `stopped` if it cannot continue by itself. `at` is the line of the
    user's code that it executes, and `waits` the fraction of its time in which it waits for others.
    """

    call: str
    waits_for: tuple[int, ...]
    calls: int
    receives: bool = False
    stuck: bool = False
    debugged: bool = False
    last: str = ""
    at: str = ""
    waits: float = 0.0
    silence: str = ""
    stopped: bool = False

    def __str__(self) -> str:
        if self.silence:
            return f"does not answer: {self.silence}"
        if self.debugged:
            return f"is stopped in a debugger after {self.calls} calls"
        if not self.call:
            last = f", the last {self.last}" if self.last else ""
            at = f"; it is at {self.at}" if self.at else ""
            return f"is in no collective after {self.calls} calls{last}{at}"
        waits = f", waiting for {', '.join(map(str, self.waits_for))}" if self.waits_for else ""
        return f"is in {self.call}{waits}"


_KINDS: tuple[type, ...] = (str, list, int, bool, bool, bool, str, str, float, str, bool)


def silent(why: str, stopped: bool = False) -> RankState:
    """Return the state of a rank that does not answer."""
    return RankState("", (), 0, silence=why, stopped=stopped)


def read_state(found: object) -> RankState:
    """Return the state from a JSON value. Raises ValueError for anything else."""
    fields = cast("list[Any]", found) if isinstance(found, list) else []
    fits = len(fields) == len(_KINDS) and all(map(isinstance, fields, _KINDS))
    if not fits:
        raise ValueError(f"no state of a rank: {found!r}")
    call, waits_for, *more = fields
    return RankState(call, tuple(waits_for), *more)
