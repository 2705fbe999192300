"""Open the checkpoint at a path: one of this package, safetensors files, or a distributed checkpoint of torch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from meshwright.layout import warn_user

from .._errors import CheckpointError, CheckpointWarning, file_error
from ..contents.catalogue import Catalogue
from ..contents.rank_world import current_world
from ..files.file_operations import is_file, is_folder, names_in, with_time_limit
from ..formats.checksum_file import check_description, checksums_in, missing_checksums, with_checksums
from ..formats.dcp_reader import METADATA, read_dcp
from ..formats.dcp_writer import DcpFormat
from ..formats.file_check import check_files, check_pieces
from ..formats.format_interface import Format, MeshwrightFormat
from ..formats.hub_format import HubFormat, hub_file, read_index, read_single
from ..formats.manifest import MANIFEST, check_sizes, read_manifest
from .save import finish_earlier, warn_of_earlier_failure
from .step_folders import latest_step

_SHOWN_PATHS = 4
FORMATS: dict[str, Format] = {"meshwright": MeshwrightFormat(), "safetensors": HubFormat(), "dcp": DcpFormat()}
"""Every format that can be written; all of them are read."""


def format_of(name: str) -> Format:
    """Return the format of this name. Raises CheckpointError for another name."""
    if name in FORMATS:
        return FORMATS[name]
    raise CheckpointError(
        f"a checkpoint in the format {name!r}",
        "no such format",
        f"there are {len(FORMATS)} formats",
        f"use one of {', '.join(FORMATS)}",
    )


def open_checkpoint(path: str | os.PathLike[str]) -> Catalogue:
    """Return the checkpoint in a file or folder; of a folder of steps, the latest complete one.

    Warns if the checkpoint was saved with checksums, and their file is missing.

    Raises:
        CheckpointFileError: there is no checkpoint, or its description is damaged.
        ReadTimeoutError: the file system does not answer.
    """
    catalogue = _opened_in_time(path)
    if (missing := missing_checksums(catalogue)) is not None:
        warn_user(f"the files of a checkpoint cannot be checked\n{missing}", CheckpointWarning)
    return catalogue


def _opened_in_time(path: str | os.PathLike[str]) -> Catalogue:
    place = Path(path).absolute()
    return with_time_limit(lambda: _opened(place))


def _opened(place: Path) -> Catalogue:
    if is_file(place):
        return _opened_file(place)
    names = names_in(place)
    if MANIFEST in names:
        return read_manifest(place)
    if METADATA in names:
        known = checksums_in(place)
        check_description(place, METADATA, known)
        return with_checksums(read_dcp(place), known)
    step = latest_step(place)
    if step is not None:
        return read_manifest(step)
    hub = hub_file(place, names)
    if hub is not None:
        return _opened_hub(hub)
    what = "a folder without a checkpoint" if is_folder(place) else "no such file or folder"
    raise file_error(
        place,
        what,
        f"there is no {MANIFEST}, no {METADATA}, no safetensors file and no complete step",
        "pass the path of a checkpoint, or of a folder with its steps",
    )


def _opened_hub(file: Path) -> Catalogue:
    """Return the checkpoint in the files of a hub: an index, or a single file."""
    known = checksums_in(file.parent)
    if file.suffix != ".json":
        return with_checksums(read_single(file), known)
    check_description(file.parent, file.name, known, links=True)
    return with_checksums(read_index(file), known)


def _opened_file(file: Path) -> Catalogue:
    """Return the checkpoint in a file whose own path was given; other files may be beside it."""
    if file.suffix == ".json":
        return _opened_hub(file)
    known = {name: facts for name, facts in checksums_in(file.parent).items() if name == file.name}
    return replace(with_checksums(read_single(file), known), alone=True)


def open_together(path: str | os.PathLike[str]) -> Catalogue:
    """Return the same checkpoint on all ranks, once the saves in progress are complete; every rank calls it.

    Raises:
        CheckpointError: the ranks give different paths.
    """
    ranks = current_world()
    warn_of_earlier_failure(finish_earlier(ranks))
    found: list[Catalogue] = []

    def act() -> list[str]:
        found.append(open_checkpoint(path))
        return [os.path.abspath(path), str(found[0].folder)]

    (asked, folder), told = ranks.agreed(act)
    if any(asked != other for other, _ in told):
        raise CheckpointError(
            "to load a checkpoint on all ranks",
            "; ".join(f"{other} on rank {rank}" for rank, (other, _) in enumerate(told[:_SHOWN_PATHS])),
            "all ranks load one checkpoint together",
            "give every rank the same path",
        )
    if folder == told[0][1]:
        return found[0]
    return open_checkpoint(told[0][1])  # rank 0 found another step: one was completed in the meantime


def verify(path: str | os.PathLike[str]) -> Catalogue:
    """Return the checkpoint at a path, after a check of every file and every tensor in it.

    Raises:
        CheckpointFileError: a file was changed, or the file of checksums is missing; it names the first one.
    """
    catalogue = _opened_in_time(path)
    if (missing := missing_checksums(catalogue)) is not None:
        raise missing
    with_time_limit(lambda: _verify(catalogue))
    return catalogue


def _verify(catalogue: Catalogue) -> None:
    check_sizes(catalogue)
    check_files(catalogue, sorted(catalogue.files))
    check_pieces(catalogue, [(name, piece) for name, entry in catalogue.entries.items() for piece in entry.pieces])
