"""Inspection of ranks: ranks in a debugger, and the printed lines of each rank."""

from __future__ import annotations

import io
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

from ..communicators.current_communicator import installed_communicator

_DEBUGGERS = ("pdb", "bdb", "IPython.core.debugger", "pudb.debugger", "pydevd")
"""Modules of debuggers; a stopped thread has a frame of one of them on its stack."""


def in_debugger() -> bool:
    """True if a thread of this process is stopped in a debugger."""
    return any(_is_stopped(frame) for frame in sys._current_frames().values())


def _is_stopped(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") in _DEBUGGERS and frame.f_code.co_name in _STOPPED:
            return True
        frame = frame.f_back
    return False


_STOPPED = ("interaction", "user_line", "do_wait_suspend")
"""Functions of debuggers that run while a person types."""


@contextmanager
def prefix_prints() -> Generator[None]:
    """Prefix each line that a rank prints inside the block with its number: `[2] loss 0.31`.

    Lines of threads that are no ranks stay as they are. It applies to the whole process: with simulated ranks, write it
    around `simulate`.

    >>> from meshwright.comm import current_communicator, simulate
    >>> with prefix_prints():
    ...     _ = simulate(lambda: print("here", current_communicator().rank * 10), 2)
    [0] here 0
    [1] here 10
    """
    before = sys.stdout
    sys.stdout = out = _Prefixed(before)
    try:
        yield
    finally:
        sys.stdout = before
        out.end()


KEPT_LINES = 40


class KeptLines:
    """The last lines of ranks that do not print, which are shown when the run fails."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def add(self, rank: int, text: str) -> None:
        lines = (self._texts.get(rank, "") + text).splitlines(keepends=True)
        self._texts[rank] = "".join(lines[-KEPT_LINES:])

    def show(self, ranks: Sequence[int]) -> None:
        """Print the kept lines of these ranks on standard error; of all ranks if none is named."""
        for rank in ranks or sorted(self._texts):
            print_lines(rank, self._texts.get(rank, "").splitlines())


def print_lines(rank: int, lines: Iterable[str]) -> None:
    """Print lines of another rank than the first on standard error, each prefixed by its number."""
    for line in lines:
        print(f"[{rank}] {line}", file=sys.stderr)


@contextmanager
def first_rank_prints(kept: KeptLines) -> Generator[None]:
    """Print only the output of rank 0 inside the block, as with processes, where only rank 0 has the terminal.

    >>> from meshwright.comm import current_communicator, simulate
    >>> with first_rank_prints(KeptLines()):
    ...     _ = simulate(lambda: print("here", current_communicator().rank), 2)
    here 0
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_OfFirst(out, kept) for out in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Wrapped(io.TextIOBase):
    """A stream with the attributes of the stream that it writes to."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - no variable here
        return self._out.encoding

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._out.isatty()

    def fileno(self) -> int:
        return self._out.fileno()

    def flush(self) -> None:
        self._out.flush()


class _OfFirst(_Wrapped):
    """A stream that keeps the output of all ranks but the first, unless a debugger of that rank is in use."""

    def __init__(self, out: TextIO, kept: KeptLines) -> None:
        super().__init__(out)
        self._kept = kept

    def write(self, text: str, /) -> int:
        rank = _rank()
        if not rank or _is_stopped(sys._getframe()):
            self._out.write(text)
        else:
            self._kept.add(rank, text)
        return len(text)


class _Prefixed(_Wrapped):
    """A stream that prefixes lines with the rank that printed them.

    A line is written as soon as it is complete, so that lines of several ranks or processes do not mix. An incomplete
    line is written when the rank flushes it, as for a prompt, and the rank continues it.
    """

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._begun: dict[int | None, str] = {}
        self._open: int | None = None
        """The rank whose incomplete line is shown."""

    def write(self, text: str, /) -> int:
        rank = _rank()
        held = self._begun.pop(rank, "") + text
        whole = held.rfind("\n") + 1
        if held[whole:]:
            self._begun[rank] = held[whole:]
        self._put(rank, held[:whole])
        return len(text)

    def flush(self) -> None:
        self._put(_rank(), self._begun.pop(_rank(), ""))
        super().flush()

    def end(self) -> None:
        """Write all incomplete lines."""
        while self._begun:
            self._put(*self._begun.popitem())

    def _put(self, rank: int | None, text: str) -> None:
        if not text:
            return
        head = f"[{rank}] " if rank is not None else ""
        goes_on, broken = self._open == rank and rank is not None, self._open not in (None, rank)
        lines = "".join(head + line for line in text.splitlines(keepends=True))
        self._open = None if text.endswith("\n") else rank
        self._out.write("\n" * broken + (lines.removeprefix(head) if goes_on else lines))


def _rank() -> int | None:
    communicator = installed_communicator()
    return None if communicator is None else communicator.rank
