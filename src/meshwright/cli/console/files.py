"""Read, check and write the files that are named on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from meshwright.cli.console.parser import UsageError
from meshwright.layout import InputError, read_json, read_text_file, write_whole


def read_text(path: str) -> str:
    """Return the text of a file. Raises UsageError if it cannot be read."""
    try:
        return read_text_file(path)
    except InputError as error:
        raise file_error(path, error, "pass a text file that can be read") from error


def read_object(path: str, fix: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises UsageError if there is none."""
    try:
        found = read_json(read_text(path))
    except InputError as error:
        raise file_error(path, error, fix) from error
    if not isinstance(found, dict):
        raise UsageError(f"meshwright: {path}: a {type(found).__name__}\n  fix: {fix}")
    return cast(dict[str, Any], found)


def file_error(path: str, error: InputError, fix: str) -> UsageError:
    """Return the error for a file that a reader refuses."""
    return UsageError(f"meshwright: {path}: {error.found}\n  why: {error.why}\n  fix: {fix}")


def check_folder(*paths: str | None) -> None:
    """Raise UsageError, before anything runs, for an output file that is a folder, or whose folder does not exist."""
    fix = "write to a file in a folder that exists"
    for path in paths:
        if path is None:
            continue
        place = Path(path).absolute()
        if path == "":
            why = "the name of a file is empty"
        elif place.is_dir():
            why = "Is a directory"
        elif not place.parent.is_dir():
            why = "No such folder"
        else:
            continue
        raise UsageError(f"meshwright: {path}: {why}\n  fix: {fix}")


def write_text(path: str, text: str) -> None:
    """Write the text to the file, replacing it. Raises UsageError if it cannot be written."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        fix = "write to a file in a folder that is writable"
        raise UsageError(f"meshwright: {path}: {error.strerror}\n  fix: {fix}") from error
