"""A folder of checkpoints: one folder per step, of which the latest complete one is found, and old ones are removed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from ._errors import CheckpointFileError
from ._manifest import check_sizes, read_manifest

_STEP = re.compile(r"step_(\d{8,})")


def step_name(step: int) -> str:
    """Name of the folder of a step.

    >>> step_name(10)
    'step_00000010'
    """
    return f"step_{step:08}"


def steps_in(folder: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """Every folder of a step, the latest first, complete or not."""
    place = Path(folder)
    names = os.listdir(place) if place.is_dir() else []
    found = [(int(match[1]), place / name) for name in names if (match := _STEP.fullmatch(name))]
    return sorted(found, reverse=True)


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The latest step's folder that holds a complete checkpoint, or None.

    Complete means a valid manifest, and every file there with its length; reading checks the numbers too.
    """
    return next((path for _, path in steps_in(folder) if is_complete(path)), None)


def is_complete(path: Path) -> bool:
    try:
        check_sizes(read_manifest(path))
    except CheckpointFileError:
        return False
    return True


def prune(folder: Path, keep: int) -> None:
    """Removes all but the latest `keep` complete steps, and what is left of earlier removals."""
    complete = [path for _, path in steps_in(folder) if is_complete(path)]
    for path in complete[keep:]:
        with suppress(FileNotFoundError):
            path.rename(folder / f".gone.{path.name}.{token_hex(8)}")
    for path in folder.glob(".gone.step_*"):
        shutil.rmtree(path, ignore_errors=True)


def leftovers(path: Path) -> Iterator[Path]:
    """Folders in which a writer of this checkpoint was when it was killed."""
    return path.parent.glob(f".{path.name}.*.writing")


def beside(path: Path) -> Path:
    """A new name under which the checkpoint is written."""
    return path.with_name(f".{path.name}.{token_hex(8)}.writing")


def sync_folder(path: Path) -> None:
    """Brings the names in a folder to the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
