"""Write checkpoints for `torch.distributed.checkpoint`: one file of saved tensors per rank, and the metadata.

The metadata is a pickle because the format demands it. Nothing here reads it.
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import torch

from .._errors import CheckpointError
from ..contents.catalogue import ByteRange, FileFacts
from ..contents.index_runs import PartRuns, shape_of
from ..files.file_operations import write_operation
from ..files.json_values import decode_value
from ..torch_hooks import dcp_classes
from .checksum_file import CHECKSUMS, checksums_text, facts_json, facts_of_bytes, file_facts_from_json
from .dcp_reader import METADATA
from .format_interface import SaveJob, write_new


class DcpFormat:
    """The format of torch.distributed.checkpoint."""

    def prepared(self, job: SaveJob) -> Callable[[], Any]:
        for name, spec in job.table.specs.items():
            if not spec.layout.is_simple:
                raise CheckpointError(
                    f"to save {name} for torch.distributed.checkpoint",
                    f"{spec!r} on {spec.mesh!r}",
                    "a chunk is one box, and a part of a product dim is several boxes",
                    "call mw.reshard(x, x.mesh, placements) without the product dim",
                )
        return lambda: self._write(job)

    def _write(self, job: SaveJob) -> list[Any]:
        """Write this rank's file; return the facts about it, and the offsets of each tensor in it."""
        file, offsets = _file_of(job.ranks.rank), list[Any]()
        path = job.folder / file
        with write_operation(path, lambda: open(path, "xb")) as out:
            written = _Written(out)
            for name, part in job.mine():
                write_operation(path, written.save, name, job.parts[name]())
                offsets.append(_offsets(part.runs))
            if job.ranks.rank == 0:
                for name, value in job.table.values.items():
                    write_operation(path, written.save, name, decode_value(value))
                    offsets.append(None)
            write_operation(path, out.flush)
            write_operation(path, os.fsync, out.fileno())
        return [facts_json({file: written.facts()}), offsets]

    def finish(self, job: SaveJob, reports: Sequence[Any]) -> None:
        dcp, storage_info = dcp_classes()
        facts: dict[str, FileFacts] = {}
        storage: dict[Any, Any] = {}
        for told, offsets in reports:
            facts |= (found := file_facts_from_json(job.folder, told))
            for file, about_file in found.items():
                for at, r in zip(offsets, about_file.ranges, strict=True):
                    storage[dcp.MetadataIndex(r.name, at)] = storage_info(file, r.at, r.nbytes)
        about: dict[str, Any] = {name: dcp.BytesStorageMetadata() for name in job.table.values}
        for name, spec in job.table.specs.items():
            chunks = [
                dcp.ChunkStorageMetadata(torch.Size(_offsets(p.runs)), torch.Size(shape_of(p.runs)))
                for p, _ in job.shares[name]
            ]
            about[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=spec.dtype), spec.shape, chunks)
        written_by = dcp.StorageMeta(save_id=CHECKSUMS)  # the reader then misses the file of checksums
        metadata = dcp.Metadata(about, {name: (name,) for name in about}, storage, written_by)
        data = pickle.dumps(metadata)
        write_new(job.folder / METADATA, data)
        write_new(job.folder / CHECKSUMS, checksums_text(facts | {METADATA: facts_of_bytes(data)}))


def _file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _offsets(runs: PartRuns) -> list[int]:
    return [run[0][0] for run in runs]


class _Written:
    """A file to which saved tensors and values are appended, with its checksums."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file, self._digest, self._ranges = file, sha256(), list[ByteRange]()

    def save(self, name: str, value: object) -> None:
        """Append the bytes that `torch.save` writes for a tensor or value."""
        data = io.BytesIO()
        torch.save(value.clone() if isinstance(value, torch.Tensor) else value, data)
        written = data.getbuffer()
        self._digest.update(written)
        self._ranges.append(ByteRange(name, self._file.tell(), written.nbytes, zlib.crc32(written)))
        self._file.write(written)

    def facts(self) -> FileFacts:
        """Return the length, the SHA-256 and the ranges."""
        length = sum(r.nbytes for r in self._ranges)
        return FileFacts(length, self._digest.hexdigest(), tuple(self._ranges))
