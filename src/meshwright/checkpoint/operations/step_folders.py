"""A folder of checkpoints: one folder per step. The latest complete one is found, and old ones are removed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

from meshwright.layout import warn_user

from .._errors import CheckpointFileError, CheckpointWarning, NewerFormatError, ReadTimeoutError
from ..files.file_operations import names_in, with_time_limit
from ..formats.manifest import check_sizes, read_manifest

_STEP = re.compile(r"step_([0-9]{8,18})")


def step_name(step: int) -> str:
    """Return the name of the folder of a step.

    >>> step_name(10)
    'step_00000010'
    """
    return f"step_{step:08}"


def is_step(path: Path) -> bool:
    """True if a path is named as the folder of a step."""
    return _STEP.fullmatch(path.name) is not None


def steps_in(folder: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """Return every folder of a step, the latest first, complete or not."""
    place = Path(folder)
    names = names_in(place)
    found = [(int(match[1]), place / name) for name in names if (match := _STEP.fullmatch(name))]
    return sorted(found, reverse=True)


def latest_step(folder: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the latest step with a complete checkpoint, or None.

    Complete means that the manifest is valid, and every file exists with its length. Loading checks the checksums too.
    Warns of later steps that are not complete: a save that was interrupted leaves none, so they were damaged.
    """
    steps = [path for _, path in steps_in(folder)]
    found = with_time_limit(lambda: next((path for path in steps if is_complete(path)), None))
    damaged = steps[: steps.index(found)] if found is not None else steps
    if damaged:
        names, used = ", ".join(path.name for path in damaged[:3]), "none" if found is None else found.name
        warn_user(f"damaged checkpoints in {folder}: {names}; the latest complete one is {used}", CheckpointWarning)
    return found


def is_complete(path: Path) -> bool:
    """True if a folder holds a complete checkpoint. Raises ReadTimeoutError if the file system does not answer.

    A checkpoint in a newer format counts as complete, since it is not known to be damaged. Reading it is an error.
    """
    try:
        with_time_limit(lambda: check_sizes(read_manifest(path)))
    except NewerFormatError:
        return True
    except ReadTimeoutError:
        raise
    except CheckpointFileError:
        return False
    return True


def prune(folder: Path, keep: int) -> None:
    """Remove all but the latest `keep` complete steps, and the remains of earlier removals.

    A step that cannot be removed is reported by a CheckpointWarning, because the new checkpoint is complete.
    """
    complete = [path for _, path in steps_in(folder) if is_complete(path)]
    for path in complete[keep:]:
        try:
            path.rename(folder / f".gone.{path.name}.{token_hex(8)}")
        except FileNotFoundError:
            continue
        except OSError as error:
            warn_user(
                f"{path} was not removed, although only {keep} steps are kept: {error.strerror}",
                CheckpointWarning,
            )
    for path in folder.glob(".gone.step_*"):
        shutil.rmtree(path, ignore_errors=True)


def set_aside(path: Path) -> None:
    """Rename a damaged step, so that the step can be saved again; nothing is removed."""
    other = path.with_name(f"damaged.{path.name}.{token_hex(4)}")
    path.rename(other)
    warn_user(f"{path} was damaged, and is now {other.name}: the step is saved again", CheckpointWarning)


def abandoned_folders(path: Path) -> Iterator[Path]:
    """Yield the folders of writers of this checkpoint that were killed."""
    return path.parent.glob(f".{path.name}.*.writing")


def temporary_path(path: Path) -> Path:
    """Return a new temporary name, under which the checkpoint is written."""
    return path.with_name(f".{path.name}.{token_hex(8)}.writing")


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
