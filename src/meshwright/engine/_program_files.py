"""Programs of a model in a folder: saved once recorded, and taken from there instead of being recorded again.

Every rank has a folder of its own in it, with one file per program and an index, `programs.json`: for which kinds of
batch each program is, and what the model was when they were recorded. Files of programs are named by what they hold,
so that an index never speaks of a file that holds another program.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from meshwright.comm import current
from meshwright.graph import (
    Holds,
    Input,
    Program,
    Slot,
    compiled,
    holds_of,
    load_program,
    machine,
    no_program,
    read_json,
    save_kernels,
    save_program,
    slots_of,
    told,
    with_kernels,
    write_whole,
    written_inputs,
)
from meshwright.layout import Spec

from ._description import lies_text, spec_text
from ._errors import StaticError
from ._inputs import lay_as, states_fit
from ._model import Model
from ._pipeline import Piped, taken_from
from ._setting import Roots, Setting
from ._shared import made_once
from ._variants import Dynamic, Sizes, Variant, Variants, fits_sizes, kind_of, sizes_of

KIND = "meshwright programs"
FORMAT = 3
INDEX = "programs.json"


@dataclass(frozen=True, slots=True)
class Saved:
    """A program that was loaded, and the file of its kernels where this machine can run them; or a pipeline's step."""

    program: Program
    kernels: Path | None = None
    piped: Piped | None = None

    def lowered(self, writes: bool) -> Program:
        """The program with kernels: those of the file, or new ones, which write in place where they may."""
        if self.kernels is not None:
            return with_kernels(self.program, current(), self.kernels)
        return compiled(self.program, current(), writes=writes)


@dataclass(slots=True)
class Shelf:
    """Programs that were loaded and not asked for yet; `taken` counts those that were."""

    stored: list[Stored] = field(default_factory=list[Any])
    taken: int = 0

    def take(self, key: Any, leaves: Sequence[Any], roots: Roots, apart: Callable[[], bool]) -> Variant[Saved] | None:
        """The program for such a batch in the setting of now, if there is one.

        A program that writes in place wants tensors `apart`.
        """
        if not self.stored:
            return None
        text = key_text(key, tuple(map(kind_of, leaves)))
        for at, row in enumerate(self.stored):
            if row.key != text or (written_inputs(row.saved.program) and not apart()):
                continue
            variant = row.variant(leaves, roots)
            if variant is not None:
                del self.stored[at]
                self.taken += 1
                return variant
        return None


@dataclass(frozen=True, slots=True)
class Stored:
    """A program that was loaded, the key of the calls that it is for, and the setting as data."""

    key: list[str]
    saved: Saved
    sizes: Sizes
    dynamic: Dynamic
    holds: Callable[[Sequence[Any]], bool]
    setting: Mapping[str, Any]

    def variant(self, leaves: Sequence[Any], roots: Roots) -> Variant[Saved] | None:
        """Return the variant if it takes the batch in the setting of now."""
        if not fits_sizes(self.sizes, self.dynamic, sizes_of(leaves)) or not self.holds(leaves):
            return None
        if not states_fit(self.saved.program.inputs, slots_of(roots.network), roots.optimizer):
            return None
        setting = Setting.restored(self.setting, roots)
        return None if setting is None else Variant(self.saved, self.sizes, self.dynamic, self.holds, setting)


def key_text(key: Any, kinds: Any) -> list[str]:
    """Return as text all that two calls must have in common, beside sizes."""
    mode, *rest = key
    return [mode, *map(repr, rest), repr(kinds)]


def save_programs(folder: Any, model: Model, variants: Variants[Any], marks: Mapping[str, str], kernels: bool) -> None:
    """Writes every program that can still be asked for, then the index; files of earlier programs are removed."""
    place = _place(folder)
    place.mkdir(parents=True, exist_ok=True)
    rows = [_saved(place, key, v, kernels) for key, v in _asked_for(variants)]
    if not rows:
        raise StaticError(
            f"dist_model.save({os.fspath(folder)!r})", "no program that holds a whole step",
            "programs are recorded at the first call for a kind of batch; what runs in pieces is no program",
            "dist_model.compile(*batch) first, with tensors that may be on the meta device",
        )  # fmt: skip
    here = current()
    index = {
        "kind": KIND,
        "format": FORMAT,
        "ranks": here.size,
        "rank": here.rank,
        "model": model.text(),
        "marks": dict(marks),
        "programs": rows,
    }
    text = json.dumps(index, indent=1)
    write_whole(place / INDEX, json.dumps({"sha256": _sum(text), "index": text}).encode())
    for old in {p.name for p in place.glob("program-*")} - {name for row in rows for name in _files(row)}:
        (place / old).unlink(missing_ok=True)


def _asked_for(variants: Variants[Any]) -> Iterator[tuple[list[str], Variant[Any]]]:
    for (key, kinds), found in variants.known.items():
        text = key_text(key, kinds)
        yield from ((text, variant) for variant in found if variant.program.whole)


def _files(row: Mapping[str, Any]) -> list[str]:
    return [row["file"], *[made["file"] for made in row["kernels"]]]


def _saved(place: Path, key: list[str], variant: Variant[Any], kernels: bool) -> dict[str, Any]:
    assert isinstance(variant.holds, Holds)
    table = variant.program.table
    beside = place / f".program.{os.getpid()}"
    checksum = save_program(variant.program.program, beside)
    name = f"program-{checksum[:16]}.safetensors"
    os.replace(beside, place / name)
    return {
        "file": name,
        "key": key,
        "sizes": [list(shape) for shape in variant.sizes],
        "dynamic": [[leaf, sorted(dims)] for leaf, dims in variant.dynamic.items()],
        "holds": variant.holds.as_data(),
        "kernels": list(_saved_kernels(place, name, variant.program.program)) if kernels and table is None else [],
        "pipeline": table,
        "setting": variant.setting.stored(),
    }


def _saved_kernels(place: Path, name: str, program: Program) -> Iterator[dict[str, Any]]:
    """Where the kernels of the program are, if they can be saved."""
    path = place / name.replace(".safetensors", ".pt2")
    if save_kernels(program, current(), path):
        yield {"file": path.name, "sha256": sha256(path.read_bytes()).hexdigest(), "machine": machine()}


def _kernels(place: Path, rows: Sequence[Mapping[str, Any]], program: str) -> Path | None:
    """The file with kernels, where it is what was saved, and was saved on such a machine."""
    path = place / program.replace(".safetensors", ".pt2")
    for row in rows:
        fits = row["machine"] == machine() and row["file"] == path.name and path.is_file()
        if fits and sha256(path.read_bytes()).hexdigest() == row["sha256"]:
            return path
    return None


def load_programs(folder: Any, model: Model, shelf: Shelf) -> tuple[dict[str, Spec], dict[str, str]]:
    """Puts the programs of a folder on the shelf; gives how parameters and buffers lie in them, and lay at first.

    The model's tensors are laid like that. Raises ProgramFileError for files that hold none, and StaticError for
    programs of another model; both before anything is changed.
    """
    path = _place(folder) / INDEX
    try:
        data = path.read_bytes()
    except OSError as error:
        raise no_program(path, f"{error.strerror}; programs are saved for each of the ranks that there were") from error
    index = told(path, lambda: _index(data))
    _check(path, index, model)
    found = [told(path, lambda row=row: _stored(path, row)) for row in index["programs"]]
    given = [i for row in found for i in row.saved.program.inputs if i.role in ("parameter", "buffer")]
    inputs, slots = {i.name: i for i in given}, slots_of(model.network)
    _check_marks(path, index["marks"], inputs, slots)
    lay_as(given, slots, model.optimizer)
    shelf.stored += found
    return {i.value.name: i.spec for i in given if i.spec is not None}, index["marks"]


def _index(data: bytes) -> dict[str, Any]:
    outer = read_json(data)
    if _sum(outer["index"]) != outer["sha256"]:
        raise ValueError("its checksum is another one: the file was changed")
    index = read_json(outer["index"])
    if index["kind"] != KIND or index["format"] > FORMAT:
        raise ValueError(f"it is {index['kind']!r} of format {index['format']}, this reads formats up to {FORMAT}")
    if not isinstance(index["programs"], list) or not all(isinstance(index[k], dict) for k in ("model", "marks")):
        raise ValueError("it is no index of programs")
    return {**index, "model": {**index["model"], "rank": f"{index['rank']} of {index['ranks']}"}}


def _check(path: Path, index: Mapping[str, Any], model: Model) -> None:
    """Raises StaticError where the programs are those of another model, or of other ranks."""
    here, before = current(), index["model"]
    now = {"rank": f"{here.rank} of {here.size}", **model.text()}
    for what in dict.fromkeys((*now, *before)):
        if before.get(what) != now.get(what):
            raise _other(path, what, before.get(what, "not there"), now.get(what, "not there"))


def _other(path: Path, what: str, before: str, now: str) -> StaticError:
    return StaticError(
        f"dist_model.load({str(path.parent.parent)!r})", f"{what} was {before}, and is {now}",
        "a program is right for the model, and for the ranks, that it was recorded of",
        "a folder that such a model saved on as many ranks; without load(), programs are recorded at the first calls",
    )  # fmt: skip


def _stored(path: Path, row: Mapping[str, Any]) -> Stored:
    name: str = row["file"]
    if not re.fullmatch(r"program-[0-9a-f]{16}\.safetensors", name):
        raise ValueError(f"{name!r} is no name of a program's file")
    sizes = tuple(tuple(map(int, shape)) for shape in row["sizes"])
    dynamic: Dynamic = {int(leaf): frozenset(map(int, dims)) for leaf, dims in row["dynamic"]}
    file, table = path.parent / name, row.get("pipeline")
    program = load_program(file, lambda checksum, decode: made_once(current(), ("files", checksum), decode))
    piped = None if table is None else taken_from(program, table)
    saved = Saved(program, _kernels(path.parent, row["kernels"], name), piped)
    return Stored(list(row["key"]), saved, sizes, dynamic, holds_of(row["holds"]), row["setting"])


def _check_marks(path: Path, marks: Mapping[str, str], inputs: Mapping[str, Input], slots: Sequence[Slot]) -> None:
    """Raises StaticError for tensors that lie neither as they did at first, nor as programs take them."""
    for slot in slots:
        given, lies = inputs.get(slot.name), lies_text(slot.tensor)
        if given is None:
            raise _other(path, slot.name, "not there", lies)
        first = marks.get(slot.name, "not there")
        if lies not in (first, spec_text(given.spec) if given.spec is not None else first):
            raise _other(path, slot.name, first, lies)


def _place(folder: Any) -> Path:
    return Path(folder) / f"rank-{current().rank}"


def _sum(text: str) -> str:
    return sha256(text.encode()).hexdigest()
