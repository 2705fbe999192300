"""The content of a checkpoint in any format: tensors by name, each in pieces in files, and values."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import ProcessMesh

from .._errors import file_error
from .index_runs import PartRuns, shape_of

_NAME = re.compile(r"\.?[\w-][\w.-]*")


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A part of a tensor, and its position: the file and the key in it."""

    file: str
    key: str
    runs: PartRuns
    crc32: int | None = None
    span: tuple[int, int] | None = None
    """First byte and number of bytes, for files that are not safetensors."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a checkpoint, with its layout and mesh at the time of saving, if known."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[TensorPiece, ...]
    lies: str = ""
    mesh: ProcessMesh | None = None

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes of a tensor or value in a file, and their CRC-32."""

    name: str
    at: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class FileFacts:
    """The length of a file, and its SHA-256 and the ranges of its tensors, if they were written down."""

    nbytes: int | None = None
    sha256: str | None = None
    ranges: tuple[ByteRange, ...] = ()


class OpenFile(ABC):
    """An open file whose tensors can be read."""

    @abstractmethod
    def check(self, piece: TensorPiece, dtype: torch.dtype) -> None:
        """Raise CheckpointFileError if the file does not hold this piece."""

    @abstractmethod
    def read(self, piece: TensorPiece, box: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
        """Return the elements of a box of the piece."""


@dataclass(frozen=True, slots=True)
class Catalogue(ABC):
    """The content of a checkpoint."""

    folder: Path
    entries: Mapping[str, TensorEntry]
    values: Mapping[str, Any]
    files: Mapping[str, FileFacts]
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Facts about the whole checkpoint, such as its format and the versions that wrote it."""
    described_in: tuple[str, ...] = ()
    """Files that describe the checkpoint, or hold values; they are checked whichever tensors are read."""
    alone: bool = False
    """True if the path of a single file was given; other files may be beside it."""

    kind = ""
    links = False
    """True if a file may be a symbolic link, as in the cache of a model hub."""
    suffix = ".safetensors"
    """The suffix of files with tensors."""

    @property
    def is_closed(self) -> bool:
        """True if `files` has every file of tensors in the folder, with its checksum."""
        return not self.alone and bool(self.files) and all(facts.sha256 is not None for facts in self.files.values())

    @abstractmethod
    def opened(self, file: str) -> AbstractContextManager[OpenFile]:
        """Open a file of the checkpoint. Raises CheckpointFileError if it cannot be read."""

    def held_in(self, file: str) -> str:
        """Return the tensors of a file, in words."""
        names = [name for name, entry in self.entries.items() if any(p.file == file for p in entry.pieces)]
        if not names:
            return "no tensor"
        return f"tensor {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def file_name(folder: Path, name: object) -> str:
    """Return `name`. Raises CheckpointFileError if it is not the name of a file in the folder itself."""
    if isinstance(name, str) and len(name) < 256 and _NAME.fullmatch(name):
        return name
    raise file_error(
        folder,
        f"a file called {str(name)[:80]!r}",
        "the files of a checkpoint are in its own folder",
        "use a checkpoint from a source that you trust",
    )


def expected_shape(piece: TensorPiece, dtype: torch.dtype, stored: torch.dtype) -> tuple[int, ...]:
    """Return the shape of a piece in a file; complex numbers may be stored as pairs of real ones."""
    shape = shape_of(piece.runs)
    return (*shape, 2) if dtype.is_complex and not stored.is_complex else shape
