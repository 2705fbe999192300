"""Programs that are kept without being asked for, so that a later start records nothing.

They lie in a folder of the machine, by a key of all that a recording depends on before it begins: the versions of torch
and Python, the code of this library, the model, its marks, the strategy, the number of ranks, the devices. A row of the
index also names the source files whose code ran, each with a checksum. What else the recording read is compared as for
all saved programs. Nothing here raises: a folder that cannot be read or written is as good as none.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from meshwright.comm import current
from meshwright.graph import Executed, is_trusted_module
from meshwright.layout import MeshwrightError, Spec

from ._model import Model
from ._program_files import Rows, Shelf, is_writer, load_programs, row_of, rows_in
from ._program_index import FORMAT, index_path, write_index
from ._setting import first_marks
from ._shared import made_once, turn_of
from ._variants import Variant

VARIABLE = "MESHWRIGHT_PROGRAMS"
"""A folder for programs, or `off`."""
MOST = 200
"""Models whose programs are kept; those of the model that was not used for the longest time go first."""

MOST_ROWS = 64
"""Programs of one model that are kept; the oldest go first."""
_LIBRARY = Path()
"""In the place of a file whose code the key tells: that of a trusted library."""


class Kept:
    """The kept programs of a model; `rows` are those that this rank wrote."""

    def __init__(self) -> None:
        self.place: Path | None = None
        self.rows: list[dict[str, Any]] = []
        self.is_known = False

    def load(self, model: Model, shelf: Shelf) -> tuple[Mapping[str, Spec], Mapping[str, str]] | None:
        """Put the programs that are there on the shelf, at the first call; return what `load_programs` returns."""
        if self.is_known:
            return None
        self.is_known, self.place = True, _place(model)
        rows = [] if self.place is None else _rows(self.place, model)
        if self.place is None or not rows:
            return None
        self.rows = [dict(row) for path, _, row in rows if path == index_path(self.place, current().rank)]
        fresh = [given for given in rows if given[2]["fresh"]]
        with suppress(MeshwrightError, OSError):
            return load_programs(self.place, fresh, model, shelf) if fresh else None
        self.rows = []
        return None

    def add(self, model: Model, marks: Mapping[str, str], key: list[str], variant: Variant[Any], ran: Executed) -> None:
        """Keep a program that was recorded of the code that `ran`."""
        sources = _sources(ran)
        if self.place is None or sources is None or not variant.program.whole or not is_writer(variant.program):
            return
        with suppress(MeshwrightError, OSError):
            _make(self.place)
            row = {**row_of(self.place, key, variant, read_back=False), "sources": sources}
            self.rows = [*self.rows[1 - MOST_ROWS :], row]
            write_index(self.place, model, marks, self.rows)


def _place(model: Model) -> Path | None:
    """Return the folder of a model's programs; None where none are kept."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen == "off":
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen or Path(cache) / "meshwright" / "programs") / _key(model)


def _key(model: Model) -> str:
    facts = {
        "format": FORMAT,
        "versions": [torch.__version__, platform.python_version(), platform.machine()],
        "library": _library(),
        "ranks": current().size,
        "model": model.text(),
        "marks": first_marks(model.network),
        "devices": sorted({s.tensor.device.type for s in model.slots()}),
    }
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


@lru_cache(maxsize=1)
def _library() -> str:
    """Return a checksum of the code of this library."""
    root, found = Path(__file__).parents[1], sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)} {_sum(path)}\n".encode())
    return found.hexdigest()


def _sum(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _rows(place: Path, model: Model) -> Rows:
    """Return the programs, each `fresh` if no source file was changed; simulated ranks get what the first one found."""
    here = current()
    return made_once(here, ("kept", turn_of(here, "kept"), place), lambda: _rows_now(place, model))


def _rows_now(place: Path, model: Model) -> Rows:
    with suppress(MeshwrightError, OSError):
        os.utime(place)
        return [(path, marks, {**row, "fresh": _are_sources_here(row)}) for path, marks, row in rows_in(place, model)]
    return []


def _sources(ran: Executed) -> dict[str, str] | None:
    """Return the files whose code ran, with their checksums; None for code that is in no file, such as a notebook's."""
    files = {_file_of(code, namespace) for code, namespace in ran.codes.values()}
    try:
        return {str(path): _sum(path) for path in sorted(files - {_LIBRARY})}
    except OSError:
        return None


def _file_of(code: CodeType, namespace: Mapping[str, Any]) -> Path:
    """Return the file of code that ran; of generated code, such as that of a dataclass, the file of its module."""
    module = str(namespace.get("__name__"))
    if module.startswith("namedtuple_") or is_trusted_module(module):
        return _LIBRARY
    path = Path(code.co_filename)
    return (path if path.is_file() else Path(str(namespace.get("__file__")))).absolute()


def _are_sources_here(row: Mapping[str, Any]) -> bool:
    """True if the files that a program was recorded of hold what they held."""
    try:
        return all(_sum(Path(name)) == checksum for name, checksum in row["sources"].items())
    except (OSError, LookupError, TypeError, AttributeError):
        return False


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
