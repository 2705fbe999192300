"""Safetensors files: written as a stream with checksums, read slice by slice.

The position of each tensor is known before the first byte is written, so tensors may come one by one.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._errors import CheckpointError, file_error
from ..contents.catalogue import ByteRange, FileFacts, OpenFile, TensorEntry, TensorPiece, expected_shape
from ..contents.index_runs import full_runs
from ..files.box_reader import memory_of, read_box
from ..files.file_operations import CHUNK, OpenBytes, open_bytes, write_operation
from ..files.safetensors_header import DTYPE_OF_NAME, DTYPES, LONGEST_HEADER, HeaderEntry, read_header


@dataclass(frozen=True, slots=True)
class TensorItem:
    """A tensor to be written to a file; `get` returns it, contiguous and on the CPU, when its turn comes."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    get: Callable[[], Tensor]

    @property
    def stored(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the dtype and shape in the file; complex numbers are stored as pairs."""
        if self.dtype.is_complex:
            return self.dtype.to_real(), (*self.shape, 2)
        return self.dtype, self.shape

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise CheckpointError for a dtype that no file can hold."""
    if dtype not in DTYPES and not dtype.is_complex:
        raise CheckpointError(
            f"to save {name}",
            f"a tensor of {dtype}",
            "safetensors has no such dtype",
            f"use one of {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}",
        )


def aligned(items: Iterable[TensorItem]) -> list[TensorItem]:
    """Return the tensors sorted by element size, largest first, so that each element is aligned to its size."""
    return sorted(items, key=lambda item: -item.stored[0].itemsize)


def header_of(items: Sequence[TensorItem], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header: the first bytes of a file of these tensors."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for item in items:
        dtype, shape = item.stored
        fields[item.key] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, at + item.nbytes]}
        at += item.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER:
        raise CheckpointError(
            f"to save {len(items)} tensors in one file",
            f"a header of {len(text)} bytes",
            f"safetensors reads at most {LONGEST_HEADER}",
            "use shorter names, or save with more ranks",
        )
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, items: Sequence[TensorItem], metadata: Mapping[str, str] | None = None) -> FileFacts:
    """Write a new file and sync it; return its length, its SHA-256, and the range and CRC-32 of each tensor."""
    found, ranges, length = sha256(), dict[str, ByteRange](), 0
    with write_operation(path, open, path, "xb") as file:
        for key, part in _parts(items, metadata):
            found.update(part)
            if key:
                before = ranges.get(key, ByteRange(key, length, 0, 0))
                ranges[key] = ByteRange(key, before.at, before.nbytes + len(part), zlib.crc32(part, before.crc32))
            length += write_operation(path, file.write, part)
        write_operation(path, file.flush)
        write_operation(path, os.fsync, file.fileno())
    return FileFacts(length, found.hexdigest(), tuple(ranges.values()))


def _parts(items: Sequence[TensorItem], metadata: Mapping[str, str] | None) -> Iterable[tuple[str, Any]]:
    yield "", header_of(items, metadata)
    for item in items:
        data = bytes_of(item.get())
        if data.nbytes != item.nbytes:
            raise ValueError(f"{item.key} has {data.nbytes} bytes instead of {item.nbytes}")
        for at in range(0, max(data.nbytes, 1), CHUNK):
            yield item.key, data[at : at + CHUNK]


def bytes_of(x: Tensor) -> memoryview:
    """Return the elements of a tensor as bytes, without a copy if it is contiguous."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return memory_of(x.resolve_neg().contiguous())


class SafetensorsFile(OpenFile):
    """An open safetensors file."""

    def __init__(self, file: OpenBytes) -> None:
        self.path, self._file = file.path, file
        self.stored, self.metadata = read_header(file)

    def check(self, piece: TensorPiece, dtype: torch.dtype) -> None:
        found = self.stored.get(piece.key)
        if found is None:
            raise file_error(self.path, f"no tensor {piece.key}", "the checkpoint places the tensor in this file")
        wanted = (dtype, dtype.to_real() if dtype.is_complex else dtype)
        if found.dtype not in wanted or found.shape != expected_shape(piece, dtype, found.dtype):
            raise file_error(
                self.path,
                f"tensor {piece.key}, {found.kind} of shape {found.shape}",
                f"the checkpoint says {DTYPES.get(dtype, dtype)} of shape {expected_shape(piece, dtype, dtype)}",
            )

    def read(self, piece: TensorPiece, box: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
        found = self.stored[piece.key]
        pairs = dtype.is_complex and found.dtype is not dtype
        whole = (*box, slice(0, 2)) if pairs else box
        x = read_box(self._file, found.at, found.shape, dtype.to_real() if pairs else dtype, whole)
        return torch.view_as_complex(x) if pairs else x


@contextmanager
def open_file(path: Path, links: bool = False) -> Generator[SafetensorsFile]:
    """Open a file of tensors. Raises CheckpointFileError for a file of another kind, or one cut short."""
    with open_bytes(path, links) as file:
        yield SafetensorsFile(file)


def entries_of(path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return every tensor of a file, as one piece each, and the file's metadata."""
    with open_file(path, links=True) as opened:
        return {name: _entry(path, name, found) for name, found in opened.stored.items()}, opened.metadata


def _entry(path: Path, name: str, found: HeaderEntry) -> TensorEntry:
    if found.dtype is None:
        raise file_error(
            path,
            f"tensor {name} of {found.kind}",
            "torch has no such dtype",
            f"use a file with {', '.join(DTYPE_OF_NAME)}",
        )
    return TensorEntry(found.shape, found.dtype, (TensorPiece(path.name, name, full_runs(found.shape)),))


def digest_of(path: Path, links: bool = False) -> FileFacts:
    """Return the present length and SHA-256 of a file."""
    found = sha256()
    with open_bytes(path, links) as file:
        buffer = memoryview(bytearray(min(CHUNK, file.size)))
        for at in range(0, file.size, CHUNK):
            part = buffer[: min(CHUNK, file.size - at)]
            file.read_into(at, part)
            found.update(part)
        return FileFacts(file.size, found.hexdigest())
