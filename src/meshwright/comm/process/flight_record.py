"""The flight record of a rank: its last 200 calls, written as JSON when a call fails, and never otherwise.

    MESHWRIGHT_RECORDS    the folder; "off" for no records; by default a folder of the user for temporary files

Each run has its own folder there, with one file per rank: `rank-3.json`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .._errors import CommError
from ..communicators.call import CommCall
from ..launcher.rendezvous import RankAddress

VARIABLE = "MESHWRIGHT_RECORDS"
LENGTH = 200
_RUNS = 20
"""Number of runs whose records are kept in the default folder."""


class Noted:
    """One call of the record, with the times at which it began, was agreed on, and ended."""

    __slots__ = ("agreed", "began", "call", "ended", "number")

    def __init__(self, number: int, call: CommCall) -> None:
        self.number, self.call = number, call
        self.began = time.time()
        self.agreed: float | None = None
        self.ended: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the call as a JSON value; times are seconds since 1970, or null."""
        times = {"began": self.began, "agreed": self.agreed, "ended": self.ended}
        return {"number": self.number, "call": str(self.call)} | times


class NotedCall:
    """Context of a call in the record; `ended` is called with the call and the error that ended it, if there is one."""

    __slots__ = ("_ended", "_noted")

    def __init__(self, noted: Noted, ended: Callable[[Noted, BaseException | None], None]) -> None:
        self._noted, self._ended = noted, ended

    def __enter__(self) -> Noted:
        return self._noted

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ended(self._noted, error)


class Record:
    """The last calls of a rank."""

    def __init__(self, place: RankAddress) -> None:
        self._place = place
        self._calls: deque[Noted] = deque(maxlen=LENGTH)
        self._count = 0
        self.path: Path | None = None
        """Path of the written record; None before it is written."""

    def begin(self, call: CommCall) -> Noted:
        """Add a call that begins."""
        self._count += 1
        noted = Noted(self._count, call)
        self._calls.append(noted)
        return noted

    def write(self, error: str, about: Mapping[str, Any]) -> Path | None:
        """Write the record and return its path; None if records are off or cannot be written."""
        folder = record_folder(self._place.attempt)
        if folder is None or self._place.size < 2:
            return None
        place, calls = self._place, [noted.as_json() for noted in list(self._calls)]
        found: dict[str, Any] = {"rank": place.rank, "size": place.size, "run": place.attempt}
        found |= {"host": socket.gethostname(), "process": os.getpid(), "written": time.time(), "error": error}
        found |= {**about, "calls": calls}
        path = folder / f"rank-{self._place.rank}.json"
        with suppress(OSError):
            _write(path, json.dumps(found, indent=1))
            self.path = path
            return path
        return None

    def name_in(self, error: CommError, about: Mapping[str, Any]) -> None:
        """Write the record, and add its path to the error."""
        path = self.write(str(error), about)
        if path is not None:
            error.add_fix(f"read the last calls of each rank in {path.parent}, of this rank in {path.name}")


def record_folder(run: str, env: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder for the records of a run, which the first record creates; None if records are off."""
    env = os.environ if env is None else env
    asked, name = env.get(VARIABLE, ""), "".join(c if c.isalnum() or c in "-_." else "-" for c in run)
    if asked == "off":
        return None
    if asked:
        return Path(asked).absolute() / name
    return Path(tempfile.gettempdir()) / f"meshwright-records-{os.getuid()}" / name


def _write(path: Path, text: str) -> None:
    """Write a file atomically, readable by the user only."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if VARIABLE not in os.environ:
        _check_own(path.parent.parent)
        _forget_old(path.parent)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(file, "w", encoding="utf-8") as out:
        out.write(text)
    part.replace(path)


def _check_own(folder: Path) -> None:
    """Raise OSError unless the folder belongs to this user and is no link.

    Other users can write to the folder for temporary files.
    """
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    folder.chmod(0o700)


def _forget_old(newest: Path) -> None:
    runs = sorted(newest.parent.iterdir(), key=lambda each: each.stat().st_mtime)
    for each in runs[:-_RUNS]:
        if each != newest:
            shutil.rmtree(each, ignore_errors=True)
