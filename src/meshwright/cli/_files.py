"""Files that are named on the command line: read, or written as a whole, or answered."""

from __future__ import annotations

from pathlib import Path

from meshwright.cli._parser import UsageError
from meshwright.graph import write_whole


def read_text(path: str) -> str:
    """The text of a file. Raises UsageError where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"meshwright: {path}: {why}\n  fix: pass a file that can be read") from error


def check_folder(*paths: str | None) -> None:
    """Raises UsageError, before anything runs, for a file to write that is a folder, or in one that is not there."""
    fix = "write to a file in a folder that exists"
    for path in paths:
        place = Path(path or "a").absolute()
        if path == "" or place.is_dir() or not place.parent.is_dir():
            why = "Is a directory" if place.is_dir() else "No such folder" if path else "the name of a file is empty"
            raise UsageError(f"meshwright: {path}: {why}\n  fix: {fix}")


def write_text(path: str, text: str) -> None:
    """Puts the text in the place of the file. Raises UsageError where it cannot be written."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        fix = "write to a file in a folder that is writable"
        raise UsageError(f"meshwright: {path}: {error.strerror}\n  fix: {fix}") from error
