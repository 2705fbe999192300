"""The format that a checkpoint's files have: what each rank writes, and what one rank writes at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ._catalogue import Entry, FileFacts, Piece
from ._files import write_operation
from ._manifest import MANIFEST, manifest_text
from ._runs import shape_of
from ._safetensors import Item, aligned, write_file
from ._share import Part
from ._state import Held, Table
from ._world import World

Shares = Mapping[str, Sequence[tuple[Part, int]]]
"""Every part of every tensor, and the rank that writes it."""
Parts = dict[str, Callable[[], Tensor]]


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be written into a folder, and this rank's share of it."""

    folder: Path
    ranks: World
    table: Table
    shares: Shares
    parts: Parts
    """Name → what gives this rank's part, where this rank writes it."""
    held: Mapping[str, Held]

    def mine(self) -> list[tuple[str, Part]]:
        """What this rank writes."""
        return [(name, p) for name, parts in self.shares.items() for p, rank in parts if rank == self.ranks.rank]


class Format(Protocol):
    """A format of checkpoints."""

    def prepared(self, job: Job) -> Callable[[], Any]:
        """What this rank's thread has to do; it gives a report, which JSON can say. Ranks may talk until it returns."""
        ...

    def finish(self, job: Job, reports: Sequence[Any]) -> None:
        """What rank 0 writes once all have; `reports` are those of the ranks, in order."""
        ...


class Manifested:
    """Our own format: a safetensors file per rank, and a manifest."""

    def prepared(self, job: Job) -> Callable[[], Any]:
        return lambda: self._write(job)

    def _write(self, job: Job) -> Any:
        mine = job.mine()
        if not mine:
            return None
        items = [Item(n, job.table.specs[n].dtype, shape_of(part.runs), job.parts[n]) for n, part in mine]
        facts = write_file(job.folder / _file_of(job.ranks.rank), aligned(items))
        return [facts.nbytes, facts.sha256, {r.name: r.crc32 for r in facts.ranges}]

    def finish(self, job: Job, reports: Sequence[Any]) -> None:
        files = {_file_of(rank): FileFacts(*report[:2]) for rank, report in enumerate(reports) if report is not None}
        tensors: dict[str, Entry] = {}
        for name, parts in job.shares.items():
            spec = job.table.specs[name]
            pieces = [Piece(_file_of(rank), name, part.runs, reports[rank][2][name]) for part, rank in parts]
            tensors[name] = Entry(tuple(spec.shape), spec.dtype, tuple(pieces), repr(spec), spec.mesh)
        write_new(job.folder / MANIFEST, manifest_text(tensors, job.table.values, files, job.ranks.size))


def _file_of(rank: int) -> str:
    return f"rank_{rank:05}.safetensors"


def write_new(path: Path, data: bytes) -> None:
    """Write a new file, down to the disk."""
    with write_operation(path, open, path, "xb") as file:
        write_operation(path, file.write, data)
        write_operation(path, file.flush)
        write_operation(path, os.fsync, file.fileno())
