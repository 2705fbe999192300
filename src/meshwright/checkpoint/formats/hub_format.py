"""Safetensors files in the form of model hubs: whole tensors, in one file or in several with an index.

Reading takes slices of the tensors. For writing, each file belongs to one rank, which gathers one tensor at a time. So
a rank holds at most one whole tensor beside its own parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import ProcessMesh, Spec, replicated
from meshwright.reshard import plan

from .._errors import CheckpointError, file_error
from ..contents.catalogue import Catalogue, FileFacts, OpenFile, TensorEntry, file_name
from ..files.file_operations import open_bytes
from ..files.json_text import read_json
from .checksum_file import (
    CHECKSUMS,
    PROMISE,
    checksums_text,
    facts_json,
    facts_of_bytes,
    file_facts_from_json,
    promise_in,
)
from .format_interface import SaveJob, write_new
from .safetensors_file import TensorItem, aligned, entries_of, open_file, write_file

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LARGEST = 5 << 30
"""Most bytes of tensors in a file, unless a single tensor has more."""


@dataclass(frozen=True, slots=True)
class HubCheckpoint(Catalogue):
    """Whole tensors in safetensors files."""

    kind, links = "safetensors", True

    def opened(self, file: str) -> AbstractContextManager[OpenFile]:
        return open_file(self.folder / file, links=True)


def read_single(path: Path) -> HubCheckpoint:
    """Return the checkpoint in one file."""
    with open_bytes(path, links=True) as file:
        facts = FileFacts(file.size)
    entries, metadata = entries_of(path)
    return HubCheckpoint(path.parent, entries, {}, {path.name: facts}, about=promise_in(metadata.values()))


def read_index(path: Path) -> HubCheckpoint:
    """Return the checkpoint in several files, by an index that has the file of each tensor."""
    content, _ = read_json(path, "a file that is not an index of safetensors files", links=True)
    try:
        placed = {name: file_name(path.parent, file) for name, file in content["weight_map"].items()}
    except (LookupError, TypeError, AttributeError) as error:
        raise file_error(
            path,
            "a file that is not an index of safetensors files",
            str(error),
            'write JSON with {"weight_map": {name: file}}',
        ) from error
    found: dict[str, TensorEntry] = {}
    files: dict[str, FileFacts] = {}
    about: dict[str, Any] = {}
    for file in sorted(set(placed.values())):
        single = read_single(path.parent / file)
        files |= single.files
        about |= single.about
        found |= {name: entry for name, entry in single.entries.items() if placed.get(name) == file}
    if missing := placed.keys() - found.keys():
        raise file_error(
            path.parent / placed[min(missing)],
            f"no tensor {min(missing)}",
            f"{path.name} places the tensor in this file",
        )
    entries = {name: found[name] for name in placed}
    return HubCheckpoint(path.parent, entries, {}, files, about, described_in=(path.name,))


@dataclass(frozen=True, slots=True)
class HubFormat:
    """The format of model hubs: `model.safetensors`, or several files and an index."""

    largest: int = LARGEST

    def prepared(self, job: SaveJob) -> Callable[[], Any]:
        if job.table.values:
            raise CheckpointError(
                f"to save {min(job.table.values)} in safetensors files for a hub",
                "a value that is not a tensor",
                "such files hold only tensors",
                "save the model's tensors: model.state_dict()",
            )
        files = shared_files(job.table.specs, self.largest, job.ranks.size)
        told = [_write(job, file, names, rank) for file, names, rank in files]
        job.ranks.agreed(lambda: _raise(next((t for t in told if isinstance(t, Exception)), None)))
        written = {file: t for (file, _, _), t in zip(files, told, strict=True) if isinstance(t, FileFacts)}
        return lambda: facts_json(written)

    def finish(self, job: SaveJob, reports: Sequence[Any]) -> None:
        facts = {file: told for report in reports for file, told in file_facts_from_json(job.folder, report).items()}
        files = shared_files(job.table.specs, self.largest, job.ranks.size)
        if len(files) > 1:
            total = sum(spec.nbytes for spec in job.table.specs.values())
            placed = {name: file for file, names, _ in files for name in names}
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": placed}, indent=2).encode()
            write_new(job.folder / INDEX, text)
            facts[INDEX] = facts_of_bytes(text)
        write_new(job.folder / CHECKSUMS, checksums_text(facts))


def shared_files(specs: Mapping[str, Spec], largest: int, ranks: int) -> list[tuple[str, list[str], int]]:
    """Return every file: its name, its tensors, and the rank that writes it.

    >>> from meshwright.layout import ProcessMesh, parse_spec
    >>> spec = parse_spec("f32[4]", ProcessMesh([0]))
    >>> for file in shared_files({"a": spec, "b": spec, "c": spec}, 32, 2): print(*file)
    model-00001-of-00002.safetensors ['a', 'b'] 0
    model-00002-of-00002.safetensors ['c'] 1
    """
    groups: list[list[str]] = [[]]
    nbytes = 0
    for name, spec in specs.items():
        if groups[-1] and nbytes + spec.nbytes > largest:
            groups.append([])
            nbytes = 0
        groups[-1].append(name)
        nbytes += spec.nbytes
    if len(groups) == 1:
        return [(SINGLE, groups[0], 0)]
    many = len(groups)
    return [(f"model-{at + 1:05}-of-{many:05}.safetensors", names, at % ranks) for at, names in enumerate(groups)]


def _write(job: SaveJob, file: str, names: Sequence[str], rank: int) -> FileFacts | Exception | None:
    """Write one file, by one rank; return the facts about it there, or the error.

    All ranks take part in gathering its tensors one after the other, also after writing has failed.
    """
    specs = job.table.specs
    items = aligned(TensorItem(n, specs[n].dtype, tuple(specs[n].shape), lambda n=n: bring(n)) for n in names)
    brought = iter(items)

    def bring(name: str) -> Tensor:
        next(brought)
        return _whole_on(rank, name, job)

    found: FileFacts | Exception | None = None
    if job.ranks.rank == rank:
        try:
            found = write_file(job.folder / file, items, {"format": "pt", PROMISE: CHECKSUMS})
        except Exception as error:
            found = error
    for item in brought:
        _whole_on(rank, item.key, job)
    return found


def _whole_on(rank: int, name: str, job: SaveJob) -> Tensor:
    """Return the whole tensor on the given rank; other ranks get an arbitrary tensor."""
    ranks, spec, held = job.ranks, job.table.specs[name], job.held.get(name)
    if ranks.communicator is None:
        return job.parts[name]()
    mine = held is not None and ranks.rank in spec.mesh
    part = held.part.detach().contiguous() if held is not None else torch.empty(0, dtype=spec.dtype, device="cpu")
    if spec.layout.is_replicated and rank in spec.mesh:
        return part.cpu()
    target = Spec(ProcessMesh([rank], ["owner"]), replicated(spec.ndim), spec.shape, spec.dtype)
    if not mine and ranks.rank != rank:
        return part
    with torch.no_grad():
        return ranks.communicator.convert(plan(spec, target), part).cpu()


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def hub_file(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the index of a folder with these names, or its only file of tensors; None if it has neither."""
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    files = [name for name in names if name.endswith(".safetensors")]
    for found, usual in ((indexes, INDEX), (files, SINGLE)):
        if len(found) == 1 or usual in found:
            return folder / (usual if usual in found else found[0])
    return None
