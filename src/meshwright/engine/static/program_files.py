"""Programs of a model in a folder: saved once recorded, and taken from there instead of being recorded again.

One folder is for all ranks. Ranks that hold parts of the same shapes run one program, and the first of them saves it. A
program is taken where the model was captured and its digest is the saved one's: then recording would give the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.graph import (
    Program,
    SizeConditions,
    are_alike,
    compiled,
    convert_file_errors,
    first_alike,
    load_program,
    machine,
    model_tensors,
    program_file_error,
    read_size_conditions,
    read_specs,
    save_kernels,
    save_program,
    specs_data,
    specs_in,
    with_kernels,
)
from meshwright.layout import inside, read_file

from .._errors import StaticError
from ..recording.program_inputs import states_fit
from ..recording.recorded_model import RecordedModel
from ..recording.setting_text import layout_text
from ..recording.shared_recordings import made_once
from ..recording.variants import ProgramVariant, Variants
from .pipeline_step import PipelineStep, split_joined_step
from .program_index import checked_name, file_name, other_model, read_indexes, write_index

Row = Mapping[str, Any]


MOST_KERNELS = 2**30
"""Most bytes of a file of kernels."""


@dataclass(frozen=True, slots=True)
class KernelFile:
    """A file of kernels, and the checksum that the index has for it."""

    path: Path
    sha256: str

    def load(self, program: Program) -> Program | None:
        """Return the program with the kernels; None unless the file has the checksum.

        The kernels are loaded from a copy of the bytes that were checked, so that nobody can exchange them in between.
        """
        data = read_file(self.path, MOST_KERNELS, links=False)
        if sha256(data).hexdigest() != self.sha256:
            return None
        with TemporaryDirectory() as folder:
            copy = Path(folder) / self.path.name
            copy.write_bytes(data)
            return with_kernels(program, current_communicator(), copy)


@dataclass(frozen=True, slots=True)
class SavedProgram:
    """A program or a pipeline's step of a file, with the file of its kernels if this machine can run them.

    It is `shared` if it is for all ranks with parts of the same shapes. `holds` tests if it fits a batch.
    `table` describes the pipeline, if there is one. `constants` maps the place of each input that is a constant of the
    captured call to the number of this constant in the call.
    """

    program: Program
    holds: Callable[[Sequence[Any]], bool]
    shared: bool
    kernels: KernelFile | None = None
    table: Mapping[str, Any] | None = None
    captures: tuple[str, ...] = ()
    constants: Mapping[int, int] = field(default_factory=dict[int, int])

    @property
    def piped(self) -> PipelineStep | None:
        """Return the step of a pipeline, or None. Raises an error of Python for a table of another form."""
        return None if self.table is None else split_joined_step(self.program, self.table)

    def of_call(self, constants: Sequence[Tensor]) -> SavedProgram:
        """Return the program with the constants of this captured call: Python may write to them between steps."""
        if not self.constants:
            return self
        inputs = list(self.program.inputs)
        for at, number in self.constants.items():
            inputs[at] = replace(inputs[at], source=constants[number])
        return replace(self, program=replace(self.program, inputs=tuple(inputs)))

    def lowered(self, writes: bool) -> Program:
        """Return the program with kernels: those of the file, or new ones, which write in place if `writes`."""
        if self.kernels is not None:
            found = self.kernels.load(self.program)
            if found is not None:
                return found
        return compiled(self.program, current_communicator(), writes=writes)

    def fits(self, leaves: Sequence[Any], model: RecordedModel, trains: bool) -> bool:
        """True if the program fits a batch and, for a training step, the optimizer's states.

        States that can be created before the first step may be missing.
        """
        optimizer = model.optimizer if trains else None
        return self.holds(leaves) and states_fit(self.program.inputs, model.slots(), optimizer)


def save_programs(
    folder: str | os.PathLike[str],
    model: RecordedModel,
    variants: Variants[Any],
    marks: Mapping[str, str],
    kernels: bool,
) -> None:
    """Write the recorded programs, each by the first rank that it is for, and remove those of earlier calls.

    Every rank makes the call, which returns when all ranks have written.
    """
    here, place = current_communicator(), Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    asked = [v for found in variants.known.values() for v in found if can_be_saved(v.program)]
    if not asked:
        raise StaticError(
            f"dist_model.save({os.fspath(folder)!r})",
            "no program that holds a whole step",
            "the first call for a kind of batch records its program. A model in pieces has no such program. A program "
            "cannot be saved if a hook, a backward pass or an optimizer of your own ran during its recording",
            "call dist_model.compile(*batch) first; its tensors may be on the meta device",
        )
    write_index(place, model, marks, [row_of(place, v, kernels) for v in asked if is_writer(v.program)])
    here.barrier(tuple(range(here.size)))


def can_be_saved(found: Any) -> bool:
    """True for a compiled program that holds a whole step and has a digest."""
    return found.whole and found.digest is not None


def is_writer(found: Any) -> bool:
    """True if this rank is the first one that the compiled program is for."""
    here = current_communicator().rank
    return not found.shared or first_alike(specs_in(found.program), here) == here


def row_of(place: Path, variant: ProgramVariant[Any], kernels: bool = False, read_back: bool = True) -> dict[str, Any]:
    """Write the program of a variant into the folder, and return its row of the index."""
    assert isinstance(variant.holds, SizeConditions)
    found = variant.program
    program: Program = found.program
    beside = place / f".program-{current_communicator().rank}.{os.getpid()}"
    checksum = save_program(program, beside, read_back)
    name = file_name(current_communicator().rank, checksum)
    os.replace(beside, place / name)
    return {
        "file": name,
        "digest": found.digest,
        "captures": list(found.captures),
        "rank": program.rank,
        "shared": found.shared,
        "parts": specs_data(specs_in(program)),
        "holds": variant.holds.as_data(),
        "kernels": list(_saved_kernels(place, name, program)) if kernels and found.table is None else [],
        "pipeline": found.table,
        "constants": sorted(found.constants.items()),
    }


def _saved_kernels(place: Path, name: str, program: Program) -> Iterator[dict[str, Any]]:
    """Yield the file of the program's kernels, its checksum and the machine, if they can be saved."""
    path = place / name.replace(".safetensors", ".pt2")
    if save_kernels(program, current_communicator(), path):
        checksum = sha256(read_file(path, MOST_KERNELS)).hexdigest()
        yield {"file": path.name, "sha256": checksum, "machine": machine()}


def _kernels(place: Path, rows: Sequence[Row], program: str) -> KernelFile | None:
    """Return the file with a program's kernels; None if there is none, or it is of another kind of machine."""
    name = program.replace(".safetensors", ".pt2")
    for row in rows:
        if row["machine"] == machine() and row["file"] == name and (place / name).exists():
            return KernelFile(inside(place, name), str(row["sha256"]))
    return None


@dataclass(frozen=True, slots=True)
class TrustedCode:
    """The code that the caller of a load trusts: native code of `kernels`, and `operators` of other libraries."""

    kernels: bool = False
    operators: frozenset[str] = frozenset()


def load_programs(
    folder: str | os.PathLike[str], model: RecordedModel, trusted: TrustedCode
) -> list[tuple[str, SavedProgram]]:
    """Return the programs of a folder that are for this rank, with their digests.

    Raises ProgramFileError for files that hold none, and StaticError for programs of another model.
    """
    place, found = Path(folder), list[tuple[str, SavedProgram]]()
    for path, index in read_indexes(place, model):
        _check_marks(place, index, model)
        found += convert_file_errors(path, lambda path=path, index=index: _programs_for_this_rank(path, index, trusted))
    if not found:
        rank = current_communicator().rank
        raise program_file_error(place, f"the parts of rank {rank} have other shapes than those of the saved programs")
    return found


def _programs_for_this_rank(path: Path, index: Row, trusted: TrustedCode) -> list[tuple[str, SavedProgram]]:
    """Return the programs of an index that are for this rank, with their digests."""
    return [
        (str(row["digest"]), saved_of(path.parent, row, trusted)) for row in index["programs"] if is_for_this_rank(row)
    ]


def is_for_this_rank(row: Row) -> bool:
    """True if the program of the row is for this rank."""
    rank, here = int(row["rank"]), current_communicator().rank
    return rank == here or (row["shared"] is True and are_alike(read_specs(row["parts"]), rank, here))


def saved_of(place: Path, row: Row, trusted: TrustedCode) -> SavedProgram:
    """Return the program of a row, with kernels if they are trusted. Raises ProgramFileError for a file of none."""
    name, table = checked_name(row["file"]), row["pipeline"]

    def share(checksum: str, decode: Callable[[], Program]) -> Program:
        return made_once(current_communicator(), ("files", checksum, trusted), decode)

    program = load_program(inside(place, name), share, trusted.operators)
    kernels = _kernels(place, row["kernels"], name) if trusted.kernels else None
    constants = {int(at): int(number) for at, number in row["constants"]}
    if any(program.inputs[at].role != "constant" for at in constants):
        raise ValueError(f"inputs {sorted(constants)} are not all constants of the program")
    found = SavedProgram(
        program, read_size_conditions(row["holds"]), row["shared"] is True, kernels, table, captures_of(row), constants
    )
    _ = found.piped  # raises for a table of another form
    return found


def captures_of(row: Row) -> tuple[str, ...]:
    """Return the checksums of the calls that the program of a row was captured of."""
    found = row.get("captures", ())
    return tuple(map(str, found)) if isinstance(found, list) else ()


def _check_marks(folder: Path, index: Row, model: RecordedModel) -> None:
    """Raise StaticError for tensors that have neither their first layout nor the one that programs take."""
    for slot in model_tensors(model.network):
        lies, first = layout_text(slot.tensor), index["marks"].get(slot.name, "missing")
        if lies not in (first, index["homes"].get(slot.name)):
            raise other_model(folder, slot.name, first, lies)
