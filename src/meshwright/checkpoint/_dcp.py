"""torch's distributed checkpoints, read without running what is in them.

Their `.metadata` is a pickle. It is read by an unpickler that knows a list of names and makes records of our own in
their place, which hold what was written and do nothing; any other name is refused. Tensors and values are read by
`torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._catalogue import Catalogue, Entry, FileFacts, OpenFile, Piece, file_name
from ._errors import CheckpointFileError, bad_file, no_system
from ._runs import are_whole, shape_of

METADATA = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
}  # fmt: skip
"""Module → the classes for which a record stands."""


class _Record:
    """What stands for an object of a class that is not loaded: its fields."""

    fields: Any = None

    def __setstate__(self, state: Any) -> None:
        self.fields = state

    def get(self, name: str) -> Any:
        return self.fields.get(name) if isinstance(self.fields, dict) else None


def _nothing(*_: Any) -> None:
    """What stands for a value that no one needs: paths, memory formats and layouts of tensors."""


def _size(dims: Any = ()) -> tuple[int, ...]:
    return tuple(int(n) for n in dims)


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _nothing,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _nothing,
    **{(module, "PosixPath"): _nothing for module in ("pathlib", "pathlib._local")},
    **{(module, "PurePosixPath"): _nothing for module in ("pathlib", "pathlib._local")},
    ("collections", "OrderedDict"): dict,
}
"""Name → what stands for it."""


class Restricted(pickle.Unpickler):
    """An unpickler that finds only what the metadata of a distributed checkpoint needs."""

    def find_class(self, module: str, name: str, /) -> Any:
        if name in _CLASSES.get(module, ()):
            return _Record
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no such metadata needs")

    def persistent_load(self, pid: Any, /) -> Any:
        raise pickle.UnpicklingError("it names an object outside of it")


@dataclass(frozen=True, slots=True)
class Dcp(Catalogue):
    """A checkpoint of torch.distributed.checkpoint."""

    kind = "dcp"

    def opened(self, file: str) -> AbstractContextManager[OpenFile]:
        return _open(self.folder / file)


def read_dcp(folder: Path) -> Dcp:
    """The checkpoint in a folder. Raises CheckpointFileError for metadata that is none, or names what it must not."""
    path = folder / METADATA
    try:
        with open(path, "rb") as file:
            found = Restricted(file).load()
        return _catalogue(folder, found)
    except CheckpointFileError:
        raise
    except OSError as error:
        raise no_system(path, error) from error
    except Exception as error:  # a broken pickle may raise anything
        raise bad_file(path, "no metadata of a distributed checkpoint, or a part of it",
                       str(error) or type(error).__name__) from error  # fmt: skip


def _catalogue(folder: Path, found: Any) -> Dcp:
    places = {(index.get("fqn"), index.get("offset")): info for index, info in found.get("storage_data").items()}
    entries: dict[str, Entry] = {}
    values: dict[str, Any] = {}
    for name, about in found.get("state_dict_metadata").items():
        if about.get("chunks") is None:
            values[name] = _value(folder, name, _place(folder, name, places[name, None]))
            continue
        dtype = about.get("properties").fields[0]
        pieces = [_piece(folder, name, chunk, places) for chunk in about.get("chunks")]
        if not are_whole(about.get("size"), [piece.runs for piece in pieces]):
            raise bad_file(folder / METADATA, f"tensor {name} of shape {about.get('size')} in {len(pieces)} chunks",
                           "the chunks leave gaps, overlap or lie outside")  # fmt: skip
        entries[name] = Entry(about.get("size"), dtype, tuple(p for p in pieces if 0 not in shape_of(p.runs)))
    files = {piece.file: FileFacts() for entry in entries.values() for piece in entry.pieces}
    return Dcp(folder, entries, values, files)


def _piece(folder: Path, name: str, chunk: Any, places: Any) -> Piece:
    offsets, sizes = chunk.get("offsets"), chunk.get("sizes")
    file, span = _place(folder, name, places[name, offsets])
    return Piece(file, name, tuple(((o, n),) for o, n in zip(offsets, sizes, strict=True)), None, span)


def _place(folder: Path, name: str, info: Any) -> tuple[str, tuple[int, int]]:
    if info.get("transform_descriptors"):
        raise bad_file(
            folder / METADATA, f"{name}, transformed by {info.get('transform_descriptors')}",
            "it was compressed or encrypted by an extension", "a checkpoint saved without extensions",
        )  # fmt: skip
    return file_name(folder, info.get("relative_path")), (int(info.get("offset")), int(info.get("length")))


def _value(folder: Path, name: str, place: tuple[str, tuple[int, int]]) -> Any:
    file, span = place
    with _open(folder / file) as opened:
        return opened.loaded(name, span)


class DcpFile(OpenFile):
    """An open file; what was read last is kept, for the next box of it."""

    def __init__(self, path: Path, file: io.BufferedReader) -> None:
        self.path, self._file = path, file
        self._latest: tuple[tuple[int, int], Any] | None = None

    def loaded(self, name: str, span: tuple[int, int]) -> Any:
        """What a range of bytes holds."""
        if self._latest is not None and self._latest[0] == span:
            return self._latest[1]
        start, length = span
        self._file.seek(start)
        data = self._file.read(length)
        if len(data) != length:
            raise bad_file(self.path, f"{len(data)} of the {length} bytes of {name}", "the file was cut short")
        try:
            value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # a broken archive may raise anything
            raise bad_file(self.path, f"{name}, which torch.load(weights_only=True) refuses",
                           (str(error) or type(error).__name__).split("\n")[0]) from error  # fmt: skip
        self._latest = (span, value)
        return value

    def check(self, piece: Piece, dtype: torch.dtype) -> None:
        x = self.loaded(piece.key, piece.span or (0, 0))
        if not isinstance(x, Tensor) or x.dtype != dtype or tuple(x.shape) != shape_of(piece.runs):
            found = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise bad_file(self.path, f"{piece.key}, {found}",
                           f"the metadata says {dtype} of shape {shape_of(piece.runs)}")  # fmt: skip

    def read(self, piece: Piece, box: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
        return self.loaded(piece.key, piece.span or (0, 0))[box]


@contextmanager
def _open(path: Path) -> Generator[DcpFile]:
    try:
        file = open(path, "rb")
    except FileNotFoundError as error:
        raise bad_file(path, "no such file", "the metadata says that it is there") from error
    except OSError as error:
        raise no_system(path, error) from error
    with file:
        yield DcpFile(path, file)
