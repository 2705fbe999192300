"""Check that the files of a checkpoint are unchanged, and name the tensor that was changed."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from contextlib import suppress

from .._errors import CheckpointFileError, file_error
from ..contents.catalogue import Catalogue, FileFacts, TensorPiece
from ..files.file_operations import CHUNK, open_bytes
from .safetensors_file import bytes_of, digest_of


def check_files(catalogue: Catalogue, files: list[str]) -> None:
    """Raise CheckpointFileError if a file was changed; it names the tensor if possible."""
    for file in files:
        facts = catalogue.files.get(file, FileFacts())
        if facts.sha256 is None:
            continue
        found = digest_of(catalogue.folder / file, catalogue.links)
        if found.sha256 != facts.sha256:
            raise file_error(
                catalogue.folder / file,
                f"SHA-256 {found.sha256}; {_changed(catalogue, file)}",
                f"the checkpoint records {facts.sha256}: the file was changed",
            )


def _changed(catalogue: Catalogue, file: str) -> str:
    """Return which tensor of a file was changed, in words."""
    with suppress(CheckpointFileError):
        name = _changed_range(catalogue, file) or _changed_piece(catalogue, file)
        if name is not None:
            return f"tensor {name} was changed" if name in catalogue.entries else f"value {name} was changed"
    return f"the header was changed, or the position of {catalogue.held_in(file)}"


def _changed_range(catalogue: Catalogue, file: str) -> str | None:
    """Return the first tensor or value whose bytes have another CRC-32 than the checksum file."""
    with open_bytes(catalogue.folder / file, catalogue.links) as opened:
        for r in catalogue.files[file].ranges:
            found = 0
            for at in range(r.at, r.at + r.nbytes, CHUNK):
                found = zlib.crc32(opened.read(at, min(CHUNK, r.at + r.nbytes - at)), found)
            if found != r.crc32:
                return r.name
    return None


def _changed_piece(catalogue: Catalogue, file: str) -> str | None:
    """Return the first tensor with a piece whose CRC-32 differs from the manifest."""
    with catalogue.opened(file) as opened:
        for name, entry in catalogue.entries.items():
            for piece in entry.pieces:
                if piece.file != file or piece.crc32 is None:
                    continue
                opened.check(piece, entry.dtype)
                if zlib.crc32(bytes_of(opened.read(piece, _all_of(piece), entry.dtype))) != piece.crc32:
                    return name
    return None


def _all_of(piece: TensorPiece) -> tuple[slice, ...]:
    return tuple(slice(0, sum(length for _, length in run)) for run in piece.runs)


def check_pieces(catalogue: Catalogue, pieces: Iterable[tuple[str, TensorPiece]]) -> None:
    """Raise CheckpointFileError if a file does not hold a piece of a tensor."""
    by_file: dict[str, list[tuple[str, TensorPiece]]] = {}
    for name, piece in pieces:
        by_file.setdefault(piece.file, []).append((name, piece))
    for file, found in by_file.items():
        with catalogue.opened(file) as opened:
            for name, piece in found:
                opened.check(piece, catalogue.entries[name].dtype)
