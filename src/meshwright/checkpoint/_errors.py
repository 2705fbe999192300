"""The errors of saving and loading.

MeshwrightError
└── CheckpointError             a state that cannot be saved, or does not fit what was saved
    ├── CheckpointFileError     a file that is missing, cut short, changed, or of another kind
    │   ├── NewerFormatError    a checkpoint in a format that only a newer version reads
    │   └── ReadTimeoutError    a file system that does not answer
    ├── WriteTimeoutError       a file system that does not answer a save
    └── FolderInUseError        a folder into which another job saves
"""

from __future__ import annotations

import os

from meshwright.layout import MeshwrightError


class CheckpointError(MeshwrightError, ValueError):
    """A state that cannot be saved, or does not fit what was saved."""

    def __init__(self, asked: str, found: str, why: str, write: str) -> None:
        super().__init__(*(printable(text) for text in (asked, found, why, write)))


def printable(text: str) -> str:
    r"""Return a text with its control characters escaped, but for the ends of lines.

    >>> printable("a\x1b[2J")
    'a\\x1b[2J'
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


class CheckpointFileError(CheckpointError):
    """A file of a checkpoint that is missing, cut short, changed, or of another kind."""


class NewerFormatError(CheckpointFileError):
    """A checkpoint in a format that only a newer version reads."""


class ReadTimeoutError(CheckpointFileError):
    """A file system that does not answer within the time limit of a read."""


class WriteTimeoutError(CheckpointError):
    """A file system that does not answer within the time limit of a write."""


class FolderInUseError(CheckpointError):
    """A folder into which another job saves."""


class CheckpointWarning(UserWarning):
    """A checkpoint that was not written, or not protected by a lock, while the program goes on."""


def file_error(path: str | os.PathLike[str], found: str, why: str, write: str = "") -> CheckpointFileError:
    """Return the error that names a file."""
    return CheckpointFileError(
        f"to read {os.fspath(path)}", found, why, write or "use an older checkpoint, or a new copy of this one"
    )


def system_error(path: str | os.PathLike[str], error: OSError) -> CheckpointFileError:
    """Return the error for an OSError of a file."""
    return file_error(path, error.strerror or str(error), "the file system cannot read the file")


def write_error(path: str | os.PathLike[str], error: OSError) -> CheckpointError:
    """Return the error for an OSError while a checkpoint is written."""
    where = f" ({os.fspath(error.filename)})" if isinstance(error.filename, str) else ""
    found = f"{error.strerror or error}{where}"
    if isinstance(error, FileNotFoundError):
        return removed_folder_error(path, found)
    return CheckpointError(
        f"to save {os.fspath(path)}",
        found,
        "the file system cannot write the files",
        "free disk space or allow writing there, or save to another folder; earlier checkpoints are unchanged",
    )


def removed_folder_error(path: str | os.PathLike[str], found: str) -> CheckpointError:
    """Return the error for a folder that another program removed during a save."""
    return CheckpointError(
        f"to save {os.fspath(path)}",
        found,
        "the folder was removed or renamed while the checkpoint was written",
        "save again, and let no other program remove or rename folders there before the save has ended",
    )


def error_text(error: BaseException) -> list[str]:
    """Return the class and the four parts of an error, for other ranks."""
    if isinstance(error, MeshwrightError):
        return [type(error).__name__, error.asked, error.found, error.why, error.write]
    said = str(error) or type(error).__name__
    return ["CheckpointError", "a checkpoint", type(error).__name__, said, "remove the cause and try again"]


def error_from_text(text: list[str]) -> CheckpointError:
    """Return the error that another rank has sent as text."""
    kind, *parts = text
    asked, found, why, write = parts
    return _KINDS.get(kind, CheckpointError)(asked, found, why, write)


_KINDS: dict[str, type[CheckpointError]] = {
    cls.__name__: cls
    for cls in (CheckpointFileError, NewerFormatError, ReadTimeoutError, WriteTimeoutError, FolderInUseError)
}
