"""What can go wrong between tensors and files.

MeshwrightError
└── CheckpointError             a state that cannot be saved, or does not fit what was saved
    └── CheckpointFileError     a file that is missing, cut short, changed, or of another kind
"""

from __future__ import annotations

import os

from meshwright.layout import MeshwrightError


class CheckpointError(MeshwrightError, ValueError):
    """A state that cannot be saved, or does not fit what was saved."""


class CheckpointFileError(CheckpointError):
    """A file of a checkpoint that is missing, cut short, changed, or of another kind."""


def bad_file(path: str | os.PathLike[str], found: str, why: str, write: str = "") -> CheckpointFileError:
    """The error that names a file."""
    return CheckpointFileError(
        f"to read {os.fspath(path)}", found, why, write or "the path of an older checkpoint, or a new copy of this one"
    )


def no_system(path: str | os.PathLike[str], error: OSError) -> CheckpointFileError:
    """The error for what the system says of a file."""
    return bad_file(path, error.strerror or str(error), "the system does not give the file")


def text_of(error: BaseException) -> list[str]:
    """Class and four parts of an error, for other ranks."""
    if isinstance(error, MeshwrightError):
        return [type(error).__name__, error.asked, error.found, error.why, error.write]
    said = str(error) or type(error).__name__
    return ["CheckpointError", "a checkpoint", type(error).__name__, said, "what removes the cause, and try again"]


def error_of(text: list[str]) -> CheckpointError:
    """The error that another rank has told."""
    kind, *parts = text
    asked, found, why, write = parts
    return (CheckpointFileError if kind == "CheckpointFileError" else CheckpointError)(asked, found, why, write)
