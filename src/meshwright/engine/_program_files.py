"""Programs of a model in a folder: saved once recorded, and taken from there instead of being recorded again.

One folder is for all ranks. Ranks that hold parts of the same shapes run one program, and the first of them saves it;
an index tells for which kinds of batch each program is, for which ranks, and what the model was when it was recorded.
"""

from __future__ import annotations

import os
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
    are_alike,
    compiled,
    first_alike,
    holds_of,
    load_program,
    machine,
    no_program,
    save_kernels,
    save_program,
    slots_of,
    specs_data,
    specs_in,
    specs_of,
    told,
    with_kernels,
    written_inputs,
)
from meshwright.layout import Spec

from ._description import lies_text, spec_text
from ._errors import StaticError
from ._inputs import lay_as, states_fit
from ._model import Model
from ._pipeline import Piped, taken_from
from ._program_index import checked_name, file_name, other_model, read_indexes, write_index
from ._setting import Roots, Setting
from ._shared import made_once
from ._variants import Dynamic, Sizes, Variant, Variants, fits_sizes, kind_of, sizes_of


@dataclass(frozen=True, slots=True)
class Saved:
    """A program that was loaded, and the file of its kernels where this machine can run them; or a pipeline's step.

    It is `shared` if it is for all ranks that hold parts of the same shapes.
    """

    program: Program
    kernels: Path | None = None
    piped: Piped | None = None
    shared: bool = True

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
    """Write the programs that can still be asked for, each by the first rank that it is for, and remove earlier ones.

    Every rank makes the call, which returns when all have written.
    """
    here, place = current(), Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    asked = list(_asked_for(variants))
    if not asked:
        raise StaticError(
            f"dist_model.save({os.fspath(folder)!r})", "no program that holds a whole step",
            "programs are recorded at the first call for a kind of batch; what runs in pieces is no program",
            "dist_model.compile(*batch) first, with tensors that may be on the meta device",
        )  # fmt: skip
    write_index(place, model, marks, [row_of(place, key, v, kernels) for key, v in asked if is_writer(v.program)])
    here.barrier(tuple(range(here.size)))


def is_writer(found: Any) -> bool:
    """True if this rank is the first one that the compiled program is for."""
    here = current().rank
    return not found.shared or first_alike(specs_in(found.program), here) == here


def _asked_for(variants: Variants[Any]) -> Iterator[tuple[list[str], Variant[Any]]]:
    for (key, kinds), found in variants.known.items():
        text = key_text(key, kinds)
        yield from ((text, variant) for variant in found if variant.program.whole)


def row_of(
    place: Path, key: list[str], variant: Variant[Any], kernels: bool = False, read_back: bool = True
) -> dict[str, Any]:
    """Write the program of a variant into the folder, and return its row of the index."""
    assert isinstance(variant.holds, Holds)
    table = variant.program.table
    beside = place / f".program-{current().rank}.{os.getpid()}"
    checksum = save_program(variant.program.program, beside, read_back)
    name = file_name(current().rank, checksum)
    os.replace(beside, place / name)
    return {
        "file": name,
        "rank": variant.program.program.rank,
        "shared": variant.program.shared,
        "parts": specs_data(specs_in(variant.program.program)),
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


Rows = list[tuple[Path, Mapping[str, str], Mapping[str, Any]]]
"""Programs in a folder: the index, the marks of the model, and the row of the index."""


def rows_in(folder: Path, model: Model) -> Rows:
    """Return the programs in a folder. Raises ProgramFileError if there are none, StaticError for another model's."""
    return [(path, index["marks"], row) for path, index in read_indexes(folder, model) for row in index["programs"]]


def load_programs(folder: Path, rows: Rows, model: Model, shelf: Shelf) -> tuple[dict[str, Spec], Mapping[str, str]]:
    """Put the programs for this rank on the shelf; return how tensors lie in them, and how they lay at first.

    Parameters and buffers are laid like that. Raises ProgramFileError for files that hold none, and StaticError for
    programs of another model; both before anything is changed.
    """
    mine = [given for given in rows if told(given[0], lambda row=given[2]: _is_mine(row))]
    if not mine:
        rank = current().rank
        raise no_program(folder, f"rank {rank} holds parts of other shapes than the ranks whose programs were saved")
    found = [told(path, lambda path=path, row=row: _stored(path, row)) for path, _, row in mine]
    given = [i for row in found for i in row.saved.program.inputs if i.role in ("parameter", "buffer")]
    inputs, slots, marks = {i.name: i for i in given}, slots_of(model.network), mine[0][1]
    _check_marks(folder, marks, inputs, slots)
    lay_as(given, slots, model.optimizer)
    shelf.stored += found
    return {i.value.name: i.spec for i in given if i.spec is not None}, marks


def _is_mine(row: Mapping[str, Any]) -> bool:
    """True if the program of the row is for this rank."""
    rank, here = int(row["rank"]), current().rank
    return rank == here or (row["shared"] is True and are_alike(specs_of(row["parts"]), rank, here))


def _stored(path: Path, row: Mapping[str, Any]) -> Stored:
    name = checked_name(row["file"])
    sizes = tuple(tuple(map(int, shape)) for shape in row["sizes"])
    dynamic: Dynamic = {int(leaf): frozenset(map(int, dims)) for leaf, dims in row["dynamic"]}
    file, table = path.parent / name, row.get("pipeline")
    program = load_program(file, lambda checksum, decode: made_once(current(), ("files", checksum), decode))
    piped = None if table is None else taken_from(program, table)
    saved = Saved(program, _kernels(path.parent, row["kernels"], name), piped, row["shared"] is True)
    return Stored(list(row["key"]), saved, sizes, dynamic, holds_of(row["holds"]), row["setting"])


def _check_marks(folder: Path, marks: Mapping[str, str], inputs: Mapping[str, Input], slots: Sequence[Slot]) -> None:
    """Raises StaticError for tensors that lie neither as they did at first, nor as programs take them."""
    for slot in slots:
        given, lies = inputs.get(slot.name), lies_text(slot.tensor)
        if given is None:
            raise other_model(folder, slot.name, "not there", lies)
        first = marks.get(slot.name, "not there")
        if lies not in (first, spec_text(given.spec) if given.spec is not None else first):
            raise other_model(folder, slot.name, first, lies)
