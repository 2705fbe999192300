"""Writing what `torch.distributed.checkpoint` loads: per rank one file of saved tensors, and the metadata.

The metadata is a pickle because the format is one. Nothing here reads it.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._dcp import METADATA
from ._errors import CheckpointError
from ._format import Job, write_new
from ._runs import Runs, shape_of
from ._values import decoded
from .torch_hooks import dcp_classes


class DcpFormat:
    """The format of torch.distributed.checkpoint."""

    def prepared(self, job: Job) -> Callable[[], Any]:
        for name, spec in job.table.specs.items():
            if not spec.layout.is_simple:
                raise CheckpointError(
                    f"to save {name} for torch.distributed.checkpoint", f"{spec!r} on {spec.mesh!r}",
                    "its chunks are boxes, and a part of a product dim is several",
                    "mw.reshard(x, x.mesh, placements) without the product dim",
                )  # fmt: skip
        return lambda: self._write(job)

    def _write(self, job: Job) -> list[Any]:
        """This rank's file; where each tensor and value is in it."""
        told: list[Any] = []
        with open(job.folder / _file_of(job.ranks.rank), "xb") as file:
            for name, part in job.mine():
                told.append([name, _offsets(part.runs), *_saved(file, job.parts[name]())])
            if job.ranks.rank == 0:
                told += [[name, None, *_saved(file, decoded(v))] for name, v in job.table.values.items()]
            file.flush()
            os.fsync(file.fileno())
        return told

    def finish(self, job: Job, reports: Sequence[Any]) -> None:
        dcp, storage_info = dcp_classes()
        storage = {
            dcp.MetadataIndex(name, offsets): storage_info(_file_of(rank), at, length)
            for rank, report in enumerate(reports)
            for name, offsets, at, length in report
        }
        about: dict[str, Any] = {name: dcp.BytesStorageMetadata() for name in job.table.values}
        for name, spec in job.table.specs.items():
            chunks = [
                dcp.ChunkStorageMetadata(torch.Size(_offsets(p.runs)), torch.Size(shape_of(p.runs)))
                for p, _ in job.shares[name]
            ]
            about[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=spec.dtype), spec.shape, chunks)
        metadata = dcp.Metadata(about, {name: (name,) for name in about}, storage)
        write_new(job.folder / METADATA, pickle.dumps(metadata))


def _file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _offsets(runs: Runs) -> list[int]:
    return [run[0][0] for run in runs]


def _saved(file: io.BufferedWriter, value: Any) -> tuple[int, int]:
    """First byte and number of bytes of a tensor or value behind what is there."""
    at = file.tell()
    data = io.BytesIO()
    torch.save(value.clone() if isinstance(value, torch.Tensor) else value, data)
    return at, file.write(data.getbuffer())
