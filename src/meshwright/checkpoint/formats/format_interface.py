"""The interface of checkpoint formats: the files that each rank writes, and those that one rank writes at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from meshwright.layout import JsonValue

from ..contents.catalogue import FileFacts, TensorEntry, TensorPiece
from ..contents.index_runs import shape_of
from ..contents.part_writers import TensorPart
from ..contents.rank_world import World
from ..files.file_operations import write_operation
from .manifest import MANIFEST, manifest_text
from .safetensors_file import TensorItem, aligned, write_file
from .saved_state import HeldTensor, StateTable

PartWriters = Mapping[str, Sequence[tuple[TensorPart, int]]]
"""Each part of each tensor, with the rank that writes it."""
Parts = dict[str, Callable[[], Tensor]]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """A save into a folder: everything to be written, and this rank's share of it."""

    folder: Path
    ranks: World
    table: StateTable
    shares: PartWriters
    parts: Parts
    """Name → the function that returns this rank's part, if this rank writes it."""
    held: Mapping[str, HeldTensor]

    def mine(self) -> list[tuple[str, TensorPart]]:
        """Return the names and parts that this rank writes."""
        return [(name, p) for name, parts in self.shares.items() for p, rank in parts if rank == self.ranks.rank]


class Format(Protocol):
    """A format of checkpoints."""

    def prepared(self, job: SaveJob) -> Callable[[], JsonValue]:
        """Return the work of this rank's thread, a function that returns a JSON report.

        Ranks may communicate until `prepared` returns, but not in the thread.
        """
        ...

    def finish(self, job: SaveJob, reports: Sequence[JsonValue]) -> None:
        """Write the files of rank 0 once all ranks have written theirs; `reports` are in the order of the ranks."""
        ...


class MeshwrightFormat:
    """The format of this package: a safetensors file per rank, and a manifest."""

    def prepared(self, job: SaveJob) -> Callable[[], JsonValue]:
        return lambda: self._write(job)

    def _write(self, job: SaveJob) -> JsonValue:
        mine = job.mine()
        if not mine:
            return None
        items = [TensorItem(n, job.table.specs[n].dtype, shape_of(part.runs), job.parts[n]) for n, part in mine]
        facts = write_file(job.folder / _file_of(job.ranks.rank), aligned(items))
        return [facts.nbytes, facts.sha256, {r.name: r.crc32 for r in facts.ranges}]

    def finish(self, job: SaveJob, reports: Sequence[JsonValue]) -> None:
        files = {_file_of(rank): FileFacts(*report[:2]) for rank, report in enumerate(reports) if report is not None}
        tensors: dict[str, TensorEntry] = {}
        for name, parts in job.shares.items():
            spec = job.table.specs[name]
            pieces = [TensorPiece(_file_of(rank), name, part.runs, reports[rank][2][name]) for part, rank in parts]
            tensors[name] = TensorEntry(tuple(spec.shape), spec.dtype, tuple(pieces), repr(spec), spec.mesh)
        write_new(job.folder / MANIFEST, manifest_text(tensors, job.table.values, files, job.ranks.size))


def _file_of(rank: int) -> str:
    return f"rank_{rank:05}.safetensors"


def write_new(path: Path, data: bytes) -> None:
    """Write a new file, down to the disk."""
    with write_operation(path, open, path, "xb") as file:
        write_operation(path, file.write, data)
        write_operation(path, file.flush)
        write_operation(path, os.fsync, file.fileno())
