"""File operations, each with a time limit.

A read or write never returns if the file system no longer answers, and nothing can interrupt it. So operations run in
a daemon thread that says which one is under way, and the caller gives up once one of them takes longer than the limit.
The thread is left behind; it ends at its next operation. Time in which the whole process is stopped does not count.

Every file operation of a load is a function of this module; `tests/checkpoint/test_laws.py` checks that.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from .._errors import CheckpointError, ReadTimeoutError, WriteTimeoutError, file_error, system_error

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
CHUNK = 1 << 24
"""Most bytes that one operation reads."""
MOST_NAMES = 1_000_000
"""Most names of a folder that are listed."""
_here = threading.local()


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """A limit of one file operation: its variable and seconds, what is done, and the error with its remedy."""

    variable: str
    seconds: float
    verb: str
    error: type[CheckpointError]
    fix: str


READING = TimeLimit(
    "MESHWRIGHT_READ_TIMEOUT", 60.0, "read", ReadTimeoutError, "check the mount, load from another copy"
)
WRITING = TimeLimit(
    "MESHWRIGHT_WRITE_TIMEOUT", 300.0, "save", WriteTimeoutError, "check the mount, save to another folder"
)


class _Watch:
    """The work of a reading thread, and its result."""

    def __init__(self, limit: TimeLimit) -> None:
        self.limit = limit
        self.under_way: tuple[Path, object] | None = None
        self.given_up = False
        self.ended = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self, act: Callable[[], Any]) -> None:
        _here.watch = self
        try:
            self.result = act()
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()


def seconds_of(limit: TimeLimit) -> float:
    """Return the seconds that one file operation may take: those of the variable, or of the limit.

    Raises CheckpointError for a variable that is no positive number.
    """
    text = os.environ.get(limit.variable, "")
    try:
        seconds = float(text) if text else limit.seconds
    except ValueError:
        seconds = 0.0
    if seconds > 0:
        return seconds
    raise CheckpointError(
        f"{limit.variable}={text}",
        "not a positive number",
        f"the value is the time limit of one file operation of a {limit.verb}, in seconds",
        f"set {limit.variable}={limit.seconds:g}",
    )


def write_seconds() -> float:
    """Return the seconds that one file operation of a save may take."""
    return seconds_of(WRITING)


def with_time_limit(act: Callable[[], T], limit: TimeLimit = READING) -> T:
    """Return `act()`; raise the limit's error once one file operation in it takes longer than the limit."""
    if getattr(_here, "watch", None) is not None:
        return act()
    watch, seconds = _Watch(limit), seconds_of(limit)
    name = "checkpoint reader" if limit is READING else "checkpoint writer"
    threading.Thread(target=watch.run, args=(act,), name=name, daemon=True).start()
    try:
        _wait(watch, seconds)
    finally:
        watch.given_up = True
    if watch.error is not None:
        raise watch.error
    return watch.result


def _wait(watch: _Watch, limit: float) -> None:
    """Wait for the end, and raise ReadTimeoutError when one operation has been in progress for the limit."""
    tick, waited, seen = min(0.25, limit / 8), 0.0, None
    while not watch.ended.wait(tick):
        now = watch.under_way
        waited = waited + tick if now is not None and now is seen else 0.0
        seen = now
        if now is not None and waited >= limit:
            kind = watch.limit
            raise kind.error(
                f"to {kind.verb} {now[0]}",
                f"no answer from the file system for {limit:g} s",
                f"the file system has failed, or is slower than the time limit of a {kind.verb}",
                f"{kind.fix}, or set {kind.variable} to more seconds",
            )


def read_operation(path: Path, call: Callable[[*Arguments], T], *args: *Arguments) -> T:
    """Return `call(*args)`, a file operation on `path`, under the time limit. OSErrors are passed on."""
    watch: _Watch | None = getattr(_here, "watch", None)
    if watch is None:
        return with_time_limit(lambda: read_operation(path, call, *args))
    if watch.given_up:
        raise CheckpointError(
            f"to {watch.limit.verb} {path}",
            "an abandoned operation",
            "an earlier file operation took too long",
            f"{watch.limit.verb} again",
        )
    around, watch.under_way = watch.under_way, (path, object())
    try:
        return call(*args)
    finally:
        watch.under_way = around


def write_operation(path: Path, call: Callable[[*Arguments], T], *args: *Arguments) -> T:
    """Return `call(*args)`, a file operation of a save on `path`, under the time limit of writes. OSError passes."""
    return with_time_limit(lambda: read_operation(path, call, *args), WRITING)


class OpenBytes:
    """An open regular file: its path, and its length at the time of opening."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path, self.size, self._descriptor = path, size, descriptor

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes from byte `at` on. Raises CheckpointFileError if the file is shorter."""
        self._check(at, count)
        parts: list[bytes] = []
        while count:
            try:
                part = read_operation(self.path, os.pread, self._descriptor, min(count, CHUNK), at)
            except OSError as error:
                raise system_error(self.path, error) from error
            if not part:
                raise self._cut_short(at)
            parts.append(part)
            at, count = at + len(part), count - len(part)
        return b"".join(parts) if len(parts) != 1 else parts[0]

    def read_into(self, at: int, out: memoryview) -> None:
        """Fill `out` with the bytes from byte `at` on. Raises CheckpointFileError if the file is shorter."""
        self._check(at, out.nbytes)
        done = 0
        while done < out.nbytes:
            part = out[done : done + CHUNK]
            try:
                got = read_operation(self.path, os.preadv, self._descriptor, [part], at + done)
            except OSError as error:
                raise system_error(self.path, error) from error
            if not got:
                raise self._cut_short(at + done)
            done += got

    def _cut_short(self, at: int) -> CheckpointError:
        return file_error(self.path, f"an end at byte {at}", f"the file had {self.size} bytes before")

    def _check(self, at: int, count: int) -> None:
        if at < 0 or count < 0 or at + count > self.size:
            raise file_error(self.path, f"{self.size} bytes", f"bytes {at} to {at + count} are needed")


@contextmanager
def open_bytes(path: Path, links: bool = False) -> Generator[OpenBytes]:
    """Open a regular file; `links` allows a symbolic link. Raises CheckpointFileError for anything else."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    try:
        descriptor: int = read_operation(path, os.open, path, flags)
    except FileNotFoundError as error:
        raise file_error(path, "no such file", "the checkpoint lists this file") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise file_error(
                path,
                "a link",
                "the files of a checkpoint are in its own folder",
                "put the file itself in place of the link",
            ) from error
        raise system_error(path, error) from error
    try:
        facts = read_operation(path, os.fstat, descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise file_error(
                path,
                f"a {_kind(facts.st_mode)}",
                "only regular files have a known size",
                "use a regular file of that name",
            )
        yield OpenBytes(path, descriptor, facts.st_size)
    finally:
        os.close(descriptor)


def _kind(mode: int) -> str:
    tests = {"folder": stat.S_ISDIR, "FIFO": stat.S_ISFIFO, "socket": stat.S_ISSOCK}
    return next((name for name, is_one in tests.items() if is_one(mode)), "device")


def status(path: Path) -> os.stat_result | None:
    """Return the system's status of a path, following links; None if it does not exist."""
    try:
        return read_operation(path, os.stat, path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise system_error(path, error) from error


def is_file(path: Path) -> bool:
    """True if the path exists and is no folder; reading it reports other kinds of files."""
    found = status(path)
    return found is not None and not stat.S_ISDIR(found.st_mode)


def is_folder(path: Path) -> bool:
    """True if the path is a folder, or a link to one."""
    found = status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; none if there is no folder."""
    try:
        found = read_operation(folder, _listed, folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise system_error(folder, error) from error
    if len(found) > MOST_NAMES:
        raise file_error(
            folder, f"more than {MOST_NAMES} names", "a folder of checkpoints has fewer", "use another folder"
        )
    return sorted(found)


def _listed(folder: Path) -> list[str]:
    found: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            found.append(entry.name)
            if len(found) > MOST_NAMES:
                break
    return found
