"""Bounded reading of files: regular files of a limited size, as bytes or UTF-8 text."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ._errors import InputError
from ._escape import escaped

MOST_TEXT = 16 * 2**20
"""Maximum bytes of a text file: a plan, a strategy, a cluster, a schedule, a model's configuration, a log."""

FileName = str | os.PathLike[str]


def read_file(path: FileName, most: int = MOST_TEXT, links: bool = True) -> bytes:
    """Return the bytes of a regular file. With `links=False`, the path must not be a symbolic link.

    Opening a pipe does not wait for its other end.

    Raises:
        InputError: the path is a folder, a pipe or a device, the file has more than `most` bytes, or reading fails.
    """
    asked = f"to read {escaped(os.fspath(path))}"
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(
            asked, why or "an error", "the file cannot be opened", "pass a file that can be read"
        ) from error
    try:
        return _content(file, asked, most)
    except OSError as error:
        raise InputError(asked, str(error.strerror), "the file cannot be read", "check the disk") from error
    finally:
        os.close(file)


def _content(file: int, asked: str, most: int) -> bytes:
    state = os.fstat(file)
    if not stat.S_ISREG(state.st_mode):
        raise InputError(asked, _kind(state.st_mode), "only regular files are read", "pass the path of a file")
    parts = list[bytes]()
    left = most + 1
    while left > 0 and (part := os.read(file, min(left, 2**20))):
        parts.append(part)
        left -= len(part)
        if state.st_size > most:
            break
    if left <= 0 or state.st_size > most:
        size = f"{max(state.st_size, most + 1)} bytes"
        raise InputError(asked, size, f"such a file has at most {most} bytes", "pass a smaller file")
    return b"".join(parts)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def read_text_file(path: FileName, most: int = MOST_TEXT) -> str:
    """Return the text of a regular file in UTF-8. Raises InputError as `read_file` does, and for other encodings."""
    return decoded_text(read_file(path, most), os.fspath(path))


def decoded_text(data: bytes, name: str) -> str:
    """Return the UTF-8 text in `data`, read from `name`. Raises InputError for other bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"the byte {data[error.start]:#04x} at {error.start}"
        raise InputError(f"to read {escaped(name)}", found, "the file is not UTF-8 text", "pass a text file") from error


def inside(folder: Path, name: object) -> Path:
    """Return the path of the file `name` in the folder. Raises InputError for a name with a path in it, or a link."""
    wrong = not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name
    if wrong or (folder / str(name)).is_symlink():
        raise InputError(
            f"a file of {escaped(str(folder))}",
            escaped(repr(name)[:100]),
            "the file must be in the folder itself",
            "pass a file name that has no path and is not a link",
        )
    return folder / str(name)
