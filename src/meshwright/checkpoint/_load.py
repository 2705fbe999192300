"""Reading a checkpoint into tensors that are there: each rank reads the slices that it holds.

Nothing is written before everything has been looked at, on all ranks: that each tensor is there and fits, that each
file has the SHA-256 that was written down (each file is read for that by one rank), and that it holds what it should.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from ._catalogue import Catalogue, FileFacts, Piece
from ._errors import CheckpointError, CheckpointFileError, bad_file
from ._manifest import check_sizes
from ._runs import Meeting, Runs, meetings, runs_of, whole_runs
from ._safetensors import bytes_of, digest_of
from ._state import Held, check_whole
from ._world import World, world

Reads = dict[str, list[tuple[str, Piece, list[Meeting]]]]
"""File → the tensors that are read from it: name, piece, and the boxes, there and here."""


def load(catalogue: Catalogue, tensors: Mapping[str, Held]) -> None:
    """Fills the tensors in place; every rank calls it, each with what it holds.

    Raises CheckpointError, on every rank and before the first tensor is written, for tensors that are not there or do
    not fit, and CheckpointFileError for files that are not what they were.
    """
    ranks = world()
    ranks.agreed(lambda: _check(catalogue, tensors, ranks.rank))
    reads = _reads(catalogue, tensors, ranks.rank)
    files = ranks.gathered([*reads])
    ranks.agreed(lambda: check_files(catalogue, _mine(catalogue, files, ranks)))
    ranks.agreed(lambda: _check_pieces(catalogue, reads))
    ranks.agreed(lambda: _fill(catalogue, tensors, reads))


def _check(catalogue: Catalogue, tensors: Mapping[str, Held], rank: int) -> None:
    for name, held in tensors.items():
        shape, dtype = (held.part.shape, held.part.dtype) if held.spec is None else (held.spec.shape, held.spec.dtype)
        if name not in catalogue.entries:
            raise CheckpointError(
                f"to load {name} from {catalogue.folder}", f"no such tensor among {len(catalogue.entries)}",
                _nearest(catalogue, name), "a state of tensors that were saved; those that were not, left out",
            )  # fmt: skip
        entry = catalogue.entries[name]
        if tuple(shape) != entry.shape or not widens(entry.dtype, dtype):
            raise CheckpointError(
                f"to load {name} from {catalogue.folder}", f"{entry.dtype} of shape {entry.shape}",
                f"the state has {dtype} of shape {tuple(shape)}",
                "a tensor of the shape that was saved, in its dtype or one that holds all its numbers",
            )  # fmt: skip
        if held.spec is not None:
            check_whole(name, held.spec, "to load")
    check_sizes(catalogue)


def _nearest(catalogue: Catalogue, name: str) -> str:
    last = name.rpartition(".")[2]
    near = [other for other in catalogue.entries if other.rpartition(".")[2] == last]
    return f"it has {near[0]}, for example" if near else f"it has {', '.join([*catalogue.entries][:3]) or 'none'}"


def widens(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a dtype holds every number of another one of its kind.

    >>> widens(torch.bfloat16, torch.float32), widens(torch.float32, torch.bfloat16)
    (True, False)
    """
    if saved is wanted:
        return True
    floats = saved.is_floating_point and wanted.is_floating_point
    alike = floats or (saved.is_complex and wanted.is_complex)
    return alike and saved.itemsize < wanted.itemsize and torch.promote_types(saved, wanted) is wanted


def _mine(catalogue: Catalogue, files: list[list[str]], ranks: World) -> list[str]:
    """The files that this rank checks: of those that some rank reads, shared out by their length."""
    load = [0] * ranks.size
    mine: list[str] = []
    for file in sorted({file for some in files for file in some}):
        rank = min((r for r in range(ranks.size) if file in files[r]), key=lambda r: (load[r], r))
        load[rank] += catalogue.files.get(file, FileFacts()).nbytes or 0
        if rank == ranks.rank:
            mine.append(file)
    return mine


def check_files(catalogue: Catalogue, files: list[str]) -> None:
    """Raises CheckpointFileError where a file is not what was written, naming the tensor where that can be said."""
    for file in files:
        facts = catalogue.files.get(file, FileFacts())
        if facts.sha256 is None:
            continue
        found = digest_of(catalogue.folder / file)
        if found.sha256 != facts.sha256:
            raise bad_file(catalogue.folder / file, f"SHA-256 {found.sha256}; {_changed(catalogue, file)}",
                           f"the manifest says {facts.sha256}: the file was changed")  # fmt: skip


def _changed(catalogue: Catalogue, file: str) -> str:
    """Which tensor of a file was changed, in words."""
    with suppress(CheckpointFileError), catalogue.opened(file) as opened:
        for name, entry in catalogue.entries.items():
            for piece in entry.pieces:
                if piece.file != file or piece.crc32 is None:
                    continue
                opened.check(piece, entry.dtype)
                x = opened.read(piece, _all_of(piece), entry.dtype)
                if zlib.crc32(bytes_of(x)) != piece.crc32:
                    return f"tensor {name} is another"
    return f"the header is another, or the place of {catalogue.held_in(file)}"


def _all_of(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(0, sum(length for _, length in run)) for run in piece.runs)


def _reads(catalogue: Catalogue, tensors: Mapping[str, Held], rank: int) -> Reads:
    """What this rank reads from every file."""
    found: Reads = {}
    for name, held in tensors.items():
        runs = _runs(held, rank)
        for piece in catalogue.entries[name].pieces if runs is not None else ():
            boxes = list(meetings(piece.runs, runs or ()))
            if boxes:
                found.setdefault(piece.file, []).append((name, piece, boxes))
    return found


def _runs(held: Held, rank: int) -> Runs | None:
    """What this rank holds; None outside of the tensor's mesh."""
    if held.spec is None:
        return whole_runs(held.part.shape)
    return runs_of(held.spec, rank) if rank in held.spec.mesh else None


def _check_pieces(catalogue: Catalogue, reads: Reads) -> None:
    for file, pieces in reads.items():
        with catalogue.opened(file) as opened:
            for name, piece, _ in pieces:
                opened.check(piece, catalogue.entries[name].dtype)


def _fill(catalogue: Catalogue, tensors: Mapping[str, Held], reads: Reads) -> None:
    for file, pieces in reads.items():
        with catalogue.opened(file) as opened, torch.no_grad():
            for name, piece, boxes in pieces:
                for there, here in boxes:
                    tensors[name].part[here].copy_(opened.read(piece, there, catalogue.entries[name].dtype))


def read_whole(catalogue: Catalogue, name: str) -> Tensor:
    """A tensor of the checkpoint, whole, without looking at checksums."""
    entry = catalogue.entries[name]
    held = {name: Held(torch.empty(entry.shape, dtype=entry.dtype))}
    reads = _reads(catalogue, held, 0)
    _check_pieces(catalogue, reads)
    _fill(catalogue, held, reads)
    return held[name].part
