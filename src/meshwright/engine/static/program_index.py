"""The indexes in a folder of programs: `programs-N.json` tells what rank N saved.

Of ranks that hold parts of the same shapes only the first one saves. A file of a program has the rank in its name, too,
and a checksum of what it holds, so that an index never speaks of a file that holds another program.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from meshwright.comm import current_communicator
from meshwright.graph import convert_file_errors, program_file_error
from meshwright.layout import read_file, read_json, write_whole

from .._errors import StaticError
from ..recording.recorded_model import RecordedModel
from ..recording.setting import first_marks

KIND = "meshwright programs"
FORMAT = 7
MOST_INDEX = 16 * 2**20
"""Bytes of an index."""
MOST_INDEXES = 100_000
"""Indexes of a folder that are read."""


def index_path(folder: Path, rank: int) -> Path:
    """Return where the index of the programs is that `rank` saved."""
    return folder / f"programs-{rank}.json"


def file_name(rank: int, checksum: str) -> str:
    """Return the name of the file for a program that `rank` saved."""
    return f"program-{rank}-{checksum[:16]}.safetensors"


def checked_name(name: str) -> str:
    """Return the name of a program's file. Raises ValueError for another text, such as a path out of the folder."""
    if not re.fullmatch(r"program-\d+-[0-9a-f]{16}\.safetensors", name):
        raise ValueError(f"{name!r} is not the name of a program file")
    return name


def write_index(folder: Path, model: RecordedModel, marks: Mapping[str, str], rows: list[dict[str, Any]]) -> None:
    """Write the index of this rank, whose `rows` are its programs, and remove what it saved before."""
    here = current_communicator()
    index = {
        "kind": KIND,
        "format": FORMAT,
        "ranks": here.size,
        "model": model.text(),
        "marks": dict(marks),
        "homes": first_marks(model.network),
        "programs": rows,
    }
    text = json.dumps(index, indent=1)
    path = index_path(folder, here.rank)
    if rows:
        write_whole(path, json.dumps({"sha256": _sum(text), "index": text}).encode())
    _remove_others(folder, {path.name, *(name for row in rows for name in _files(row))} if rows else set())


def _remove_others(folder: Path, kept: set[str]) -> None:
    """Remove the files of this rank that are not `kept`; the first rank also removes those of ranks that are gone."""
    here = current_communicator()
    for path in folder.glob("program*"):
        owner = re.match(r"programs?-(\d+)[-.]", path.name)
        rank = -1 if owner is None else int(owner[1])
        if path.name not in kept and (rank == here.rank or (here.rank == 0 and rank >= here.size)):
            path.unlink(missing_ok=True)


def _files(row: Mapping[str, Any]) -> list[str]:
    return [row["file"], *[made["file"] for made in row["kernels"]]]


def read_indexes(folder: Path, model: RecordedModel) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the indexes of a folder, and where they are.

    Raises ProgramFileError for a folder or a file without programs, and StaticError for programs of another model.
    """
    paths = sorted(islice(folder.glob("programs-*.json"), MOST_INDEXES))
    if not paths:
        raise program_file_error(folder, "this folder has no index of programs, such as programs-0.json")
    for path in paths:
        index = convert_file_errors(path, lambda path=path: _index(read_file(path, MOST_INDEX, links=False)))
        _check(folder, index, model)
        yield path, index


def _index(data: bytes) -> dict[str, Any]:
    outer = read_json(data, MOST_INDEX)
    if _sum(outer["index"]) != outer["sha256"]:
        raise ValueError("its checksum does not match: the file was changed")
    index = read_json(outer["index"], MOST_INDEX)
    if index["kind"] != KIND or index["format"] > FORMAT:
        raise ValueError(f"it is {index['kind']!r} of format {index['format']}, but this reads formats up to {FORMAT}")
    if not isinstance(index["programs"], list) or not all(
        isinstance(index[k], dict) for k in ("model", "marks", "homes")
    ):
        raise ValueError("it is not an index of programs")
    if not all(isinstance(row, dict) for row in index["programs"]):
        raise ValueError("one of its rows is not a program")
    return {**index, "model": {"number of ranks": str(index["ranks"]), **index["model"]}}


def _check(folder: Path, index: Mapping[str, Any], model: RecordedModel) -> None:
    """Raises StaticError where the programs are those of another model, or of another number of ranks."""
    now, before = {"number of ranks": str(current_communicator().size), **model.text()}, index["model"]
    for what in dict.fromkeys((*now, *before)):
        if before.get(what) != now.get(what):
            raise other_model(folder, what, before.get(what, "missing"), now.get(what, "missing"))


def other_model(folder: Path, what: str, before: str, now: str) -> StaticError:
    """Return the error for programs of a model that differs in `what`."""
    return StaticError(
        f"dist_model.load({str(folder)!r})",
        f"{what} was {before}, and is {now}",
        "a program is valid only for the model and the number of ranks of its recording",
        "pass a folder that this model saved on as many ranks; or leave out load(): the first calls record programs",
    )


def _sum(text: str) -> str:
    return sha256(text.encode()).hexdigest()
