"""What a checkpoint holds, whatever its format: tensors by name, each in pieces that lie in files, and values."""

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

from ._errors import bad_file
from ._runs import Runs, shape_of

_NAME = re.compile(r"\.?[\w-][\w.-]*")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor, and where it is: under which key of which file."""

    file: str
    key: str
    runs: Runs
    crc32: int | None = None
    span: tuple[int, int] | None = None
    """First byte and number of bytes, where files are no safetensors."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint, and how it lay when it was saved, where that is known."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    lies: str = ""
    mesh: ProcessMesh | None = None

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Range:
    """The bytes of a tensor or value in a file, and their CRC-32."""

    name: str
    at: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Length of a file, and its SHA-256 and the ranges of its tensors where those were written down."""

    nbytes: int | None = None
    sha256: str | None = None
    ranges: tuple[Range, ...] = ()


class OpenFile(ABC):
    """A file whose tensors can be read."""

    @abstractmethod
    def check(self, piece: Piece, dtype: torch.dtype) -> None:
        """Raises CheckpointFileError where the file does not hold this piece."""

    @abstractmethod
    def read(self, piece: Piece, box: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
        """The elements of a box of the piece."""


@dataclass(frozen=True, slots=True)
class Catalogue(ABC):
    """What a checkpoint holds."""

    folder: Path
    entries: Mapping[str, Entry]
    values: Mapping[str, Any]
    files: Mapping[str, FileFacts]
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Who wrote it, and what else is known of the whole."""
    described_in: tuple[str, ...] = ()
    """Files that say what there is, or hold values: checked whichever tensors are read."""
    alone: bool = False
    """True if the path of one file was given: others may lie beside it."""

    kind = ""
    links = False
    """True if a file may be a symbolic link, as in the cache of a model hub."""
    suffix = ".safetensors"
    """The end of the names of files with tensors."""

    @property
    def is_closed(self) -> bool:
        """True if `files` has every file of tensors in the folder, with its checksum."""
        return not self.alone and bool(self.files) and all(facts.sha256 is not None for facts in self.files.values())

    @abstractmethod
    def opened(self, file: str) -> AbstractContextManager[OpenFile]:
        """A file of the checkpoint. Raises CheckpointFileError where it cannot be read."""

    def held_in(self, file: str) -> str:
        """The tensors that lie in a file, in words."""
        names = [name for name, entry in self.entries.items() if any(p.file == file for p in entry.pieces)]
        if not names:
            return "no tensor"
        return f"tensor {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def file_name(folder: Path, name: object) -> str:
    """Return `name`. Raises CheckpointFileError if it is not the name of a file in the folder itself."""
    if isinstance(name, str) and len(name) < 256 and _NAME.fullmatch(name):
        return name
    raise bad_file(folder, f"a file called {str(name)[:80]!r}", "files of a checkpoint lie in its own folder",
                   "a checkpoint from a source that you trust")  # fmt: skip


def expected_shape(piece: Piece, dtype: torch.dtype, stored: torch.dtype) -> tuple[int, ...]:
    """Shape of a piece in a file: complex numbers may be pairs of real ones."""
    shape = shape_of(piece.runs)
    return (*shape, 2) if dtype.is_complex and not stored.is_complex else shape
