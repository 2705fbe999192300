"""Read torch's distributed checkpoints without running the code in them.

Their `.metadata` is a pickle, which the interpreter of `unpickle.py` reads. Records of this package replace the
objects of torch, and names that such metadata does not need are refused. `torch_archive.py` reads tensors and values.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from .._errors import CheckpointFileError, file_error
from ..contents.catalogue import Catalogue, FileFacts, OpenFile, TensorEntry, TensorPiece, file_name
from ..contents.index_runs import are_whole, shape_of
from ..files.file_operations import OpenBytes, open_bytes
from ..files.json_text import read_whole_file
from ..files.memory_budget import Budget
from ..files.safetensors_header import is_count
from ..files.torch_archive import SavedTensor, read_archive
from ..files.unpickle import PickledName, PickledRecord, unpickle_data
from .checksum_file import promise_in

METADATA = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
}  # fmt: skip
"""Module → its classes that are read as records."""


def _sizes(dims: Iterable[TorchValue] = ()) -> tuple[int, ...]:
    found = tuple(dims)
    if len(found) > 64 or not all(is_count(n) for n in found):
        raise ValueError("it has an invalid size")
    return found


def _nothing(*_: object) -> None:
    """Return None, for a value that is not needed: a path, a memory format, a layout."""


_NAMES: dict[tuple[str, str], Any] = {
    **{(module, name): PickledName(PickledRecord) for module, names in _CLASSES.items() for name in names},
    **{("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
    ("torch", "Size"): PickledName(_sizes),
    ("torch.serialization", "_get_layout"): PickledName(_nothing),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): PickledName(_nothing),
    **{(module, "PosixPath"): PickledName(_nothing) for module in ("pathlib", "pathlib._local")},
    **{(module, "PurePosixPath"): PickledName(_nothing) for module in ("pathlib", "pathlib._local")},
    ("collections", "OrderedDict"): PickledName(dict),
}
"""Name in a pickle → its replacement."""


@dataclass(frozen=True, slots=True)
class DcpCheckpoint(Catalogue):
    """A checkpoint of torch.distributed.checkpoint."""

    kind, suffix = "dcp", ".distcp"

    def opened(self, file: str) -> AbstractContextManager[OpenFile]:
        return _open(self.folder / file, self.files.get(file, FileFacts()).sha256 is not None)


def read_dcp(folder: Path) -> DcpCheckpoint:
    """Return the checkpoint in a folder.

    Raises:
        CheckpointFileError: the metadata is damaged, uses a forbidden name, or describes an impossible checkpoint.
    """
    path = folder / METADATA
    try:
        budget = Budget(path)
        found = unpickle_data(read_whole_file(path, budget), budget, _NAMES)
        return _catalogue(folder, found)
    except CheckpointFileError:
        raise
    except Exception as error:  # a broken pickle may raise anything
        raise file_error(
            path,
            "a file that is not metadata of a distributed checkpoint, or is truncated",
            str(error) or type(error).__name__,
        ) from error


Place = tuple[str, tuple[int, int]]
"""A file, with the first byte and the number of bytes in it."""


PieceKey = tuple[str, tuple[int, ...] | None]
"""The name of a tensor and the first index of a piece of it; None for a value."""


def _catalogue(folder: Path, found: PickledRecord) -> DcpCheckpoint:
    places = {(_name(i.get("fqn")), _offset(i.get("offset"))): info for i, info in found.get("storage_data").items()}
    described: Mapping[Any, PickledRecord] = found.get("state_dict_metadata")
    entries: dict[str, TensorEntry] = {}
    plain: dict[str, Place] = {}
    for name, about in described.items():
        if about.get("chunks") is None:
            plain[_name(name)] = _byte_range(folder, name, places[name, None])
        else:
            entries[_name(name)] = _entry(folder, name, about, places)
    spans = [(p.file, p.span or (0, 0)) for entry in entries.values() for p in entry.pieces]
    _check_apart(folder, [*plain.values(), *spans])
    values = {name: _value(folder, name, place) for name, place in plain.items()}
    files = {file: FileFacts() for file in dict.fromkeys(file for file, _ in spans)}
    described_in = (METADATA, *dict.fromkeys(file for file, _ in plain.values()))
    return DcpCheckpoint(folder, entries, values, files, _about(found), described_in)


def _about(found: PickledRecord) -> dict[str, Any]:
    """Return that the checkpoint was saved with checksums, if its metadata says so."""
    saved = found.get("storage_meta")
    return promise_in([saved.get("save_id")]) if isinstance(saved, PickledRecord) else {}


def _name(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"a name is a {type(value).__name__}")


def _offset(value: Iterable[TorchValue] | None) -> tuple[int, ...] | None:
    return None if value is None else _sizes(value)


def _entry(folder: Path, name: str, about: PickledRecord, places: Mapping[PieceKey, PickledRecord]) -> TensorEntry:
    dtype, shape = about.get("properties").fields[0], _sizes(about.get("size"))
    if not isinstance(dtype, torch.dtype) or not is_count(prod(shape) * dtype.itemsize):
        raise ValueError(f"tensor {name} has an invalid dtype or shape")
    pieces = [_piece(folder, name, chunk, places) for chunk in about.get("chunks")]
    if not are_whole(shape, [piece.runs for piece in pieces]):
        raise file_error(
            folder / METADATA,
            f"tensor {name} of shape {shape} in {len(pieces)} chunks",
            "the chunks leave gaps, overlap or exceed the tensor",
        )
    return TensorEntry(shape, dtype, tuple(p for p in pieces if 0 not in shape_of(p.runs)))


def _piece(folder: Path, name: str, chunk: PickledRecord, places: Mapping[PieceKey, PickledRecord]) -> TensorPiece:
    offsets, sizes = _sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))
    file, span = _byte_range(folder, name, places[name, offsets])
    return TensorPiece(file, name, tuple(((o, n),) for o, n in zip(offsets, sizes, strict=True)), None, span)


def _byte_range(folder: Path, name: str, info: PickledRecord) -> Place:
    if info.get("transform_descriptors"):
        raise file_error(
            folder / METADATA,
            f"{name}, transformed by {str(info.get('transform_descriptors'))[:80]}",
            "an extension has compressed or encrypted it",
            "use a checkpoint that was saved without extensions",
        )
    offset, length = info.get("offset"), info.get("length")
    if not is_count(offset) or not is_count(length):
        raise ValueError(f"{name} has an invalid range of bytes in its file")
    return file_name(folder, info.get("relative_path")), (offset, length)


def _check_apart(folder: Path, places: list[Place]) -> None:
    """Raise CheckpointFileError if two tensors or values share bytes of a file."""
    end, last = 0, ""
    for file, (start, length) in sorted(places):
        if file == last and start < end and length:
            raise file_error(
                folder / METADATA,
                f"two ranges of {file} that overlap at byte {start}",
                "every tensor and every value has its own bytes",
            )
        end, last = start + length, file


def _value(folder: Path, name: str, place: Place) -> TorchValue:
    file, span = place
    with _open(folder / file) as opened:
        return opened.value(name, span)


class DcpFile(OpenFile):
    """An open file. The latest value that was found is kept, for the next box of it."""

    def __init__(self, file: OpenBytes, is_checked: bool) -> None:
        self._file, self._is_checked = file, is_checked
        self._latest: tuple[tuple[int, int], Any] | None = None

    def found(self, name: str, span: tuple[int, int]) -> TorchValue:
        """Return the value in a range of bytes; tensors as their positions in it."""
        if self._latest is None or self._latest[0] != span:
            self._latest = (span, read_archive(self._file, name, span))
        return self._latest[1]

    def value(self, name: str, span: tuple[int, int]) -> TorchValue:
        """Return a value, with its tensors read."""
        return self._read_all(self.found(name, span))

    def _read_all(self, value: TorchValue) -> TorchValue:
        if isinstance(value, SavedTensor):
            value.check(self._file)
            return value.read(self._file)
        if isinstance(value, dict):
            return {key: self._read_all(inner) for key, inner in value.items()}
        return type(value)(map(self._read_all, value)) if isinstance(value, (list, tuple)) else value

    def check(self, piece: TensorPiece, dtype: torch.dtype) -> None:
        x = self.found(piece.key, piece.span or (0, 0))
        if not isinstance(x, SavedTensor) or x.dtype != dtype or x.shape != shape_of(piece.runs):
            found = f"{x.dtype} of shape {x.shape}" if isinstance(x, SavedTensor) else f"a {type(x).__name__}"
            raise file_error(
                self._file.path, f"{piece.key}, {found}", f"the metadata says {dtype} of shape {shape_of(piece.runs)}"
            )
        if not self._is_checked:  # by its SHA-256
            x.check(self._file)

    def read(self, piece: TensorPiece, box: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
        return self.found(piece.key, piece.span or (0, 0)).read(self._file, box)


@contextmanager
def _open(path: Path, is_checked: bool = False) -> Generator[DcpFile]:
    with open_bytes(path) as file:
        yield DcpFile(file, is_checked)
