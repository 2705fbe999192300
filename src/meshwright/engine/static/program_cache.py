"""Cache of programs on disk, so that a later start records nothing.

The programs are in a folder of the machine. Their key holds everything that a recording depends on before it begins:
the versions of torch and Python, the code of this library, the model, its marks, the strategy, the number of ranks, and
the devices. The digest of the captured call shows whether the model does the same. Nothing here raises: a folder that
cannot be read or written counts as empty.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from meshwright.comm import current_communicator
from meshwright.graph import convert_file_errors
from meshwright.layout import MeshwrightError

from ..recording.recorded_model import RecordedModel
from ..recording.setting import first_marks
from ..recording.shared_recordings import made_once, nth_request
from ..recording.variants import ProgramVariant
from .program_files import (
    SavedProgram,
    TrustedCode,
    can_be_saved,
    captures_of,
    is_for_this_rank,
    is_writer,
    row_of,
    saved_of,
)
from .program_index import FORMAT, index_path, read_indexes, write_index

VARIABLE = "MESHWRIGHT_PROGRAMS"
"""A folder for programs, or `off`."""
MOST = 200
"""Models whose programs are kept; those of the model that was not used for the longest time go first."""

MOST_ROWS = 64
"""Programs of one model that are kept; the oldest go first."""


class ProgramCache:
    """The kept programs of a model."""

    def __init__(self) -> None:
        self.place: Path | None = None
        self.rows: list[tuple[Path, dict[str, Any]]] | None = None

    def _read(self, model: RecordedModel) -> list[tuple[Path, dict[str, Any]]]:
        if self.rows is None:
            self.place = _cache_folder(model)
            self.rows = [] if self.place is None else list(_rows(self.place, model))
        return self.rows

    def captures(self, model: RecordedModel) -> Iterator[str]:
        """Yield the checksums of the calls that the programs were captured of."""
        return (str(checksum) for _, row in self._read(model) for checksum in captures_of(row))

    def find(self, digest: str, model: RecordedModel, libraries: frozenset[str]) -> Iterator[SavedProgram]:
        """Yield the programs with this digest for this rank; they may use operators of the `libraries`."""
        for path, row in self._read(model):
            with suppress(MeshwrightError, OSError):
                found = convert_file_errors(path, lambda path=path, row=row: self._saved(path, row, digest, libraries))
                if found is not None:
                    yield found

    def _saved(self, path: Path, row: dict[str, Any], digest: str, libraries: frozenset[str]) -> SavedProgram | None:
        """Return the program of the row if it has this digest and is for this rank."""
        if row["digest"] != digest or not is_for_this_rank(row):
            return None
        return saved_of(path.parent, row, TrustedCode(operators=libraries))

    def add(self, model: RecordedModel, marks: Mapping[str, str], variant: ProgramVariant[Any]) -> None:
        """Keep a program that was recorded."""
        if self.place is None or not can_be_saved(variant.program) or not is_writer(variant.program):
            return
        path = index_path(self.place, current_communicator().rank)
        mine = [row for at, row in self.rows or () if at == path]
        with suppress(MeshwrightError, OSError):
            _make(self.place)
            rows = [*mine[1 - MOST_ROWS :], row_of(self.place, variant, read_back=False)]
            write_index(self.place, model, marks, rows)
            self.rows = [*(given for given in self.rows or () if given[0] != path), *((path, row) for row in rows)]


def _cache_folder(model: RecordedModel) -> Path | None:
    """Return the folder of a model's programs; None where none are kept."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen == "off":
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen or Path(cache) / "meshwright" / "programs") / _key(model)


def _key(model: RecordedModel) -> str:
    facts = {
        "format": FORMAT,
        "versions": [torch.__version__, platform.python_version(), platform.machine()],
        "library": _library(),
        "ranks": current_communicator().size,
        "model": model.text(),
        "marks": first_marks(model.network),
        "devices": sorted({s.tensor.device.type for s in model.slots()}),
    }
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


@lru_cache(maxsize=1)
def _library() -> str:
    """Return a checksum of the code of this library."""
    root, found = Path(__file__).parents[2], sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)} {_sum(path)}\n".encode())
    return found.hexdigest()


def _sum(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _rows(place: Path, model: RecordedModel) -> list[tuple[Path, dict[str, Any]]]:
    """Return the rows of the folder; simulated ranks get those that the first one found."""
    here = current_communicator()
    return made_once(here, ("kept", nth_request(here, "kept"), place), lambda: _rows_now(place, model))


def _rows_now(place: Path, model: RecordedModel) -> list[tuple[Path, dict[str, Any]]]:
    with suppress(MeshwrightError, OSError):
        os.utime(place)
        return [(path, row) for path, index in read_indexes(place, model) for row in index["programs"]]
    return []


def _make(place: Path) -> None:
    """Make the folder, and remove the oldest ones beside it where there are too many."""
    if place.is_dir():
        return
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    for old in _oldest(place.parent.iterdir()):
        shutil.rmtree(old, ignore_errors=True)


def _oldest(folders: Iterable[Path]) -> list[Path]:
    with suppress(OSError):
        return sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)[MOST:]
    return []
