"""Safetensors files: written as a stream, with checksums on the way; read slice by slice.

A file is the length of a header in 8 bytes, the header as JSON (name, dtype, shape and bytes of every tensor), and the
tensors' bytes without gaps. So a tensor's place is known before the first byte is written, and tensors may come one by
one.
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
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ._catalogue import Entry, FileFacts, OpenFile, Piece, expected_shape
from ._errors import CheckpointError, bad_file, no_system
from ._runs import whole_runs

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""The format's names of dtypes."""
NAMED = {name: dtype for dtype, name in DTYPES.items()}
LONGEST_HEADER = 100_000_000
"""So long a header safetensors reads."""
CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor that a file is to hold; `get` gives it, contiguous and on the CPU, when its turn comes."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    get: Callable[[], Tensor]

    @property
    def stored(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape in the file: complex numbers are pairs."""
        if self.dtype.is_complex:
            return self.dtype.to_real(), (*self.shape, 2)
        return self.dtype, self.shape

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises CheckpointError for a dtype that no file can hold."""
    if dtype not in DTYPES and not dtype.is_complex:
        raise CheckpointError(
            f"to save {name}", f"a tensor of {dtype}", "safetensors has no such dtype",
            f"a tensor of one of {', '.join(str(d).removeprefix('torch.') for d in DTYPES)}",
        )  # fmt: skip


def aligned(items: Iterable[Item]) -> list[Item]:
    """The tensors in an order in which each number lies at a multiple of its size: those of large numbers first."""
    return sorted(items, key=lambda item: -item.stored[0].itemsize)


def header_of(items: Sequence[Item], metadata: Mapping[str, str] | None = None) -> bytes:
    """The first bytes of a file of these tensors."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for item in items:
        dtype, shape = item.stored
        fields[item.key] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, at + item.nbytes]}
        at += item.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER:
        raise CheckpointError(f"to save {len(items)} tensors in one file", f"a header of {len(text)} bytes",
                              f"safetensors reads {LONGEST_HEADER}", "shorter names, or more ranks")  # fmt: skip
    return len(text).to_bytes(8, "little") + text


def write_file(
    path: Path, items: Sequence[Item], metadata: Mapping[str, str] | None = None
) -> tuple[FileFacts, dict[str, int]]:
    """Writes a new file, down to the disk; gives its length and SHA-256, and the CRC-32 of each tensor."""
    found, sums, length = sha256(), dict[str, int](), 0
    with open(path, "xb") as file:
        for key, part in _parts(items, metadata):
            found.update(part)
            length += file.write(part)
            if key:
                sums[key] = zlib.crc32(part, sums.get(key, 0))
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(length, found.hexdigest()), sums


def _parts(items: Sequence[Item], metadata: Mapping[str, str] | None) -> Iterable[tuple[str, Any]]:
    yield "", header_of(items, metadata)
    for item in items:
        data = bytes_of(item.get())
        if data.nbytes != item.nbytes:
            raise ValueError(f"{item.key} has {data.nbytes} bytes, and not {item.nbytes}")
        for at in range(0, max(data.nbytes, 1), CHUNK):
            yield item.key, data[at : at + CHUNK]


def bytes_of(x: Tensor) -> memoryview:
    """The numbers of a tensor as they lie in memory, without a copy where it is contiguous."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    numbers: Any = x.resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


class SafetensorsFile(OpenFile):
    """An open file."""

    def __init__(self, path: Path, file: Any) -> None:
        self.path, self._file = path, file
        self._keys = set(file.keys())

    def check(self, piece: Piece, dtype: torch.dtype) -> None:
        if piece.key not in self._keys:
            raise bad_file(self.path, f"no tensor {piece.key}", "the checkpoint says that it is in this file")
        view = self._file.get_slice(piece.key)
        stored = NAMED.get(view.get_dtype())
        wanted = (dtype, dtype.to_real() if dtype.is_complex else dtype)
        if stored not in wanted or tuple(view.get_shape()) != expected_shape(piece, dtype, stored):
            raise bad_file(
                self.path, f"tensor {piece.key}, {view.get_dtype()} of shape {tuple(view.get_shape())}",
                f"the checkpoint says {DTYPES.get(dtype, dtype)} of shape {expected_shape(piece, dtype, dtype)}",
            )  # fmt: skip

    def read(self, piece: Piece, box: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
        try:
            view = self._file.get_slice(piece.key)
            # all of a tensor by another door: a tensor without dims has no slices
            x = view[box] if box and tuple(view.get_shape()) != _lengths(box) else self._file.get_tensor(piece.key)
        except (SafetensorError, OSError, ValueError) as error:
            raise bad_file(self.path, f"tensor {piece.key}, which cannot be read", str(error)) from error
        # a copy: pairs of doubles in the file's own memory need not lie where complex numbers may
        return torch.view_as_complex(x.clone()) if dtype.is_complex and not x.is_complex() else x


def _lengths(box: Sequence[slice]) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in box)


@contextmanager
def open_file(path: Path) -> Generator[SafetensorsFile]:
    """A file of tensors. Raises CheckpointFileError for one that is none, or was cut short."""
    try:
        handle: Any = safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise bad_file(path, "no such file", "the checkpoint says that it is there") from error
    except OSError as error:
        raise no_system(path, error) from error
    except SafetensorError as error:
        raise bad_file(path, "no safetensors file, or a part of one", str(error)) from error
    with handle as file:
        yield SafetensorsFile(path, file)


def entries_of(path: Path) -> dict[str, Entry]:
    """Every tensor of a file, as one piece each."""
    with open_file(path) as opened:
        file: Any = opened._file
        return {name: _entry(path, name, file.get_slice(name)) for name in file.keys()}


def _entry(path: Path, name: str, view: Any) -> Entry:
    dtype, shape = NAMED.get(view.get_dtype()), tuple(view.get_shape())
    if dtype is None:
        raise bad_file(path, f"tensor {name} of {view.get_dtype()}", "torch has no such dtype",
                       f"a file with {', '.join(NAMED)}")  # fmt: skip
    return Entry(shape, dtype, (Piece(path.name, name, whole_runs(shape)),))


def digest_of(path: Path) -> FileFacts:
    """Length and SHA-256 of a file as it is now."""
    found, length = sha256(), 0
    try:
        with open(path, "rb") as file:
            while data := file.read(CHUNK):
                found.update(data)
                length += len(data)
    except FileNotFoundError as error:
        raise bad_file(path, "no such file", "the checkpoint says that it is there") from error
    except OSError as error:
        raise no_system(path, error) from error
    return FileFacts(length, found.hexdigest())
