"""Looking inside ranks: which of them stand in a debugger, and whose prints are whose."""

from __future__ import annotations

import io
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TextIO

from ._current import installed

_DEBUGGERS = ("pdb", "bdb", "IPython.core.debugger", "pudb.debugger", "pydevd")
"""Modules one of whose frames is on the stack of a thread that a debugger has stopped."""


def in_debugger() -> bool:
    """Whether a thread of this process is stopped in a debugger."""
    return any(_is_stopped(frame) for frame in sys._current_frames().values())


def _is_stopped(frame: Any) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") in _DEBUGGERS and frame.f_code.co_name in _STOPPED:
            return True
        frame = frame.f_back
    return False


_STOPPED = ("interaction", "user_line", "do_wait_suspend")
"""Their functions that run while a person types."""


@contextmanager
def prefix_prints() -> Generator[None]:
    """Inside, each line that a rank prints begins with its number: `[2] loss 0.31`. Others' lines stay as they are.

    It is for the whole process: with simulated ranks, write it around `simulate`.

    >>> from meshwright.comm import current, simulate
    >>> with prefix_prints():
    ...     _ = simulate(lambda: print("here", current().rank * 10), 2)
    [0] here 0
    [1] here 10
    """
    before = sys.stdout
    sys.stdout = _Prefixed(before)
    try:
        yield
    finally:
        sys.stdout = before


@contextmanager
def first_rank_prints() -> Generator[None]:
    """Inside, what ranks print appears where rank 0 prints it, as with processes, of which that one has the terminal.

    >>> from meshwright.comm import current, simulate
    >>> with first_rank_prints():
    ...     _ = simulate(lambda: print("here", current().rank), 2)
    here 0
    """
    before = sys.stdout
    sys.stdout = _OfFirst(before)
    try:
        yield
    finally:
        sys.stdout = before


class _Wrapped(io.TextIOBase):
    """A stream that looks like the one that it writes to."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - no variable here
        return self._out.encoding

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._out.isatty()

    def fileno(self) -> int:
        return self._out.fileno()

    def flush(self) -> None:
        self._out.flush()


class _OfFirst(_Wrapped):
    """What other ranks than the first write is left out."""

    def write(self, text: str, /) -> int:
        carrier = installed()
        if carrier is None or carrier.rank == 0:
            self._out.write(text)
        return len(text)


class _Prefixed(_Wrapped):
    """A stream in which a line tells whose it is; what a rank has begun, such as a prompt, it goes on with."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._open: int | None = None
        """The rank that has begun a line."""

    def write(self, text: str, /) -> int:
        carrier = installed()
        rank = None if carrier is None else carrier.rank
        for line in text.splitlines(keepends=True):
            if self._open is not None and self._open != rank:
                self._out.write("\n")
                self._open = None
            head = f"[{rank}] " if rank is not None and self._open is None else ""
            self._out.write(head + line)
            self._open = None if line.endswith("\n") else rank
        return len(text)
