"""Reading a checkpoint into tensors that are there: each rank reads the slices that it holds.

Nothing is written before everything has been looked at, on all ranks: that each tensor is there and fits, that each
file has the SHA-256 that was written down (each file is read for that by one rank), that it holds what it should, and
that all slices have been read. So a rank has memory for its part of the state once more while it loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set

import torch
from torch import Tensor

from ._catalogue import Catalogue, FileFacts, Piece
from ._check import check_files, check_pieces
from ._errors import CheckpointError
from ._files import timed
from ._fit import Comparison, LoadReport, compared, mismatch
from ._manifest import check_sizes
from ._runs import Meeting, Runs, meetings, runs_of, whole_runs
from ._state import Held
from ._world import World, world

Reads = dict[str, list[tuple[str, Piece, list[Meeting]]]]
"""File → the tensors that are read from it: name, piece, and the boxes, there and here."""
Read = tuple[str, tuple[slice, ...], Tensor]
"""A tensor, a box of this rank's part, and what was read for it."""


def load(
    catalogue: Catalogue,
    tensors: Mapping[str, Held],
    values: Iterable[str] = (),
    *,
    strict: bool = True,
    others: Mapping[str, str] | None = None,
    whole: Callable[[str], bool] | None = None,
    scratch: Mapping[str, Held] | None = None,
    accept: Callable[[], None] | None = None,
) -> LoadReport:
    """Fill the tensors in place, and return what does not fit; every rank calls it, each with what it holds.

    `values` are the names of the values that are wanted. With `strict`, whatever does not fit is an error; a name of
    the checkpoint that nobody asks for is one where `whole` says so. `others` are things of the caller that do not fit,
    and how. `scratch` is filled before; then `accept` may
    raise. Raises CheckpointError, on every rank and before the first tensor is written; CheckpointFileError for files
    that are not what they were.
    """
    ranks, scratch = world(), scratch or {}
    found = compared(catalogue, tensors, values, ranks, others or {}, whole or (lambda name: True))
    report = found.report
    if strict and (found.rank is not None or (whole is not None and report.unexpected_keys)):
        raise _on_every_rank(mismatch(catalogue, found), found, {*tensors, *values})
    fit = {name: held for name, held in tensors.items() if name not in report.left_out} | dict(scratch)
    reads = _reads(catalogue, fit, ranks.rank)
    files = ranks.gathered([*reads])
    files[0] = list(dict.fromkeys([*files[0], *catalogue.described_in]))
    ranks.agreed(lambda: timed(lambda: check_sizes(catalogue)))
    ranks.agreed(lambda: timed(lambda: check_files(catalogue, _mine(catalogue, files, ranks))))
    pieces = [(name, piece) for read in reads.values() for name, piece, _ in read]
    ranks.agreed(lambda: timed(lambda: check_pieces(catalogue, pieces)))
    ready: list[Read] = []
    ranks.agreed(lambda: timed(lambda: ready.extend(_boxes(catalogue, reads))))
    _fill(fit, [read for read in ready if read[0] in scratch])
    if accept is not None:
        ranks.agreed(accept)
    _fill(fit, [read for read in ready if read[0] not in scratch])
    return report


def _on_every_rank(error: CheckpointError, found: Comparison, mine: Set[str]) -> CheckpointError:
    """Return the error, with a note where only another rank met it."""
    if found.rank is not None and not found.report.left_out & mine:
        error.add_note(f"raised on rank {found.rank}")
    return error


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


def _boxes(catalogue: Catalogue, reads: Reads) -> Iterator[Read]:
    """Read every box."""
    for file, pieces in reads.items():
        with catalogue.opened(file) as opened:
            for name, piece, boxes in pieces:
                for there, here in boxes:
                    yield name, here, opened.read(piece, there, catalogue.entries[name].dtype)


@torch.no_grad()
def _fill(tensors: Mapping[str, Held], reads: Iterable[Read]) -> None:
    for name, here, x in reads:
        tensors[name].part[here].copy_(x)


def read_whole(catalogue: Catalogue, name: str) -> Tensor:
    """Return a tensor of the checkpoint, whole, without looking at checksums."""
    return timed(lambda: _read_whole(catalogue, name))


def _read_whole(catalogue: Catalogue, name: str) -> Tensor:
    entry = catalogue.entries[name]
    check_pieces(catalogue, [(name, piece) for piece in entry.pieces])
    held = {name: Held(torch.empty(entry.shape, dtype=entry.dtype))}
    _fill(held, _boxes(catalogue, _reads(catalogue, held, 0)))
    return held[name].part
