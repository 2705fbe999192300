"""Load a checkpoint into existing tensors: each rank reads the slices that it holds.

Before the first tensor is written, all ranks make all checks. Each tensor exists and fits. Each file has the recorded
SHA-256; one rank reads the file for that. Each file holds the tensors that it should, and all slices have been read. So
a rank needs memory for a second copy of its part of the state while it loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set

import torch
from torch import Tensor

from .._errors import CheckpointError
from ..contents.catalogue import Catalogue, FileFacts, TensorPiece
from ..contents.index_runs import Overlap, PartRuns, full_runs, overlaps, runs_of
from ..contents.rank_world import World, current_world
from ..files.file_operations import with_time_limit
from ..formats.file_check import check_files, check_pieces
from ..formats.manifest import check_sizes
from ..formats.saved_state import HeldTensor
from .state_differences import LoadReport, StateComparison, compare_state, mismatch_error

Reads = dict[str, list[tuple[str, TensorPiece, list[Overlap]]]]
"""File → the tensors that are read from it: name, piece, and pairs of boxes (in the piece, in this rank's part)."""
Read = tuple[str, tuple[slice, ...], Tensor]
"""The name of a tensor, a box of this rank's part, and the elements read for it."""


def load(
    catalogue: Catalogue,
    tensors: Mapping[str, HeldTensor],
    values: Iterable[str] = (),
    *,
    strict: bool = True,
    others: Mapping[str, str] | None = None,
    whole: Callable[[str], bool] | None = None,
    scratch: Mapping[str, HeldTensor] | None = None,
    accept: Callable[[], None] | None = None,
) -> LoadReport:
    """Fill the tensors in place, and return the differences; every rank calls it with its own tensors.

    `values` are the names of the wanted values. With `strict`, any missing or mismatched name is an error. With
    `whole`, so is a name of the checkpoint that is not asked for and for which `whole(name)` is true. `others` are
    further mismatches that the caller found, by name. `scratch` is filled first; then `accept` may raise an error.

    Raises:
        CheckpointError: the state does not fit; raised on every rank, before the first tensor is written.
        CheckpointFileError: files are missing or were changed.
    """
    ranks, scratch = current_world(), scratch or {}
    found = compare_state(catalogue, tensors, values, ranks, others or {}, whole or (lambda name: True))
    report = found.report
    if strict and (found.rank is not None or (whole is not None and report.unexpected_keys)):
        raise _on_every_rank(mismatch_error(catalogue, found, in_part=others is None), found, {*tensors, *values})
    fit = {name: held for name, held in tensors.items() if name not in report.left_out} | dict(scratch)
    ready = _checked_reads(catalogue, fit, ranks)
    _fill(fit, [read for read in ready if read[0] in scratch])
    if accept is not None:
        ranks.agreed(accept)
    _fill(fit, [read for read in ready if read[0] not in scratch])
    return report


def _checked_reads(catalogue: Catalogue, tensors: Mapping[str, HeldTensor], ranks: World) -> list[Read]:
    """Return all that this rank reads of the tensors, after the ranks have checked the files together."""
    reads = _reads(catalogue, tensors, ranks.rank)
    files = ranks.gathered([*reads])
    files[0] = list(dict.fromkeys([*files[0], *catalogue.described_in]))
    ranks.agreed(lambda: with_time_limit(lambda: check_sizes(catalogue)))
    ranks.agreed(lambda: with_time_limit(lambda: check_files(catalogue, _files_to_check(catalogue, files, ranks))))
    pieces = [(name, piece) for read in reads.values() for name, piece, _ in read]
    ranks.agreed(lambda: with_time_limit(lambda: check_pieces(catalogue, pieces)))
    ready: list[Read] = []
    ranks.agreed(lambda: with_time_limit(lambda: ready.extend(_boxes(catalogue, reads))))
    return ready


def _on_every_rank(error: CheckpointError, found: StateComparison, mine: Set[str]) -> CheckpointError:
    """Return the error, with a note about the rank if only another rank has the difference."""
    if found.rank is not None and not found.report.left_out & mine:
        error.add_note(f"raised on rank {found.rank}")
    return error


def _files_to_check(catalogue: Catalogue, files: list[list[str]], ranks: World) -> list[str]:
    """Return the files that this rank checks: the files that ranks read are divided by their length."""
    load = [0] * ranks.size
    mine: list[str] = []
    for file in sorted({file for some in files for file in some}):
        rank = min((r for r in range(ranks.size) if file in files[r]), key=lambda r: (load[r], r))
        load[rank] += catalogue.files.get(file, FileFacts()).nbytes or 0
        if rank == ranks.rank:
            mine.append(file)
    return mine


def _reads(catalogue: Catalogue, tensors: Mapping[str, HeldTensor], rank: int) -> Reads:
    """Return the slices that this rank reads, by file."""
    found: Reads = {}
    for name, held in tensors.items():
        runs = _runs(held, rank)
        for piece in catalogue.entries[name].pieces if runs is not None else ():
            boxes = list(overlaps(piece.runs, runs or ()))
            if boxes:
                found.setdefault(piece.file, []).append((name, piece, boxes))
    return found


def _runs(held: HeldTensor, rank: int) -> PartRuns | None:
    """Return the runs of this rank's part; None outside the tensor's mesh."""
    if held.spec is None:
        return full_runs(held.part.shape)
    return runs_of(held.spec, rank) if rank in held.spec.mesh else None


def _boxes(catalogue: Catalogue, reads: Reads) -> Iterator[Read]:
    """Read every box."""
    for file, pieces in reads.items():
        with catalogue.opened(file) as opened:
            for name, piece, boxes in pieces:
                for there, here in boxes:
                    yield name, here, opened.read(piece, there, catalogue.entries[name].dtype)


@torch.no_grad()
def _fill(tensors: Mapping[str, HeldTensor], reads: Iterable[Read]) -> None:
    for name, here, x in reads:
        tensors[name].part[here].copy_(x)


def read_whole(catalogue: Catalogue, name: str) -> Tensor:
    """Return a whole tensor of the checkpoint, without a check of its checksum."""
    return with_time_limit(lambda: _read_whole(catalogue, name))


def _read_whole(catalogue: Catalogue, name: str) -> Tensor:
    entry = catalogue.entries[name]
    check_pieces(catalogue, [(name, piece) for piece in entry.pieces])
    held = {name: HeldTensor(torch.empty(entry.shape, dtype=entry.dtype, device="cpu"))}
    _fill(held, _boxes(catalogue, _reads(catalogue, held, 0)))
    return held[name].part
