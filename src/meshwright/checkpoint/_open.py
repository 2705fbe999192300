"""What lies at a path: one of our checkpoints, safetensors files, or a distributed checkpoint of torch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ._catalogue import Catalogue
from ._check import check_files, check_pieces
from ._checksums import with_checksums
from ._dcp import METADATA, read_dcp
from ._dcp_format import DcpFormat
from ._errors import CheckpointError, bad_file
from ._files import is_file, is_folder, names_in, timed
from ._format import Format, Manifested
from ._hub import HubFormat, find_hub, read_index, read_single
from ._manifest import MANIFEST, check_sizes, read_manifest
from ._save import finish_earlier
from ._steps import latest
from ._world import world

FORMATS: dict[str, Format] = {"meshwright": Manifested(), "safetensors": HubFormat(), "dcp": DcpFormat()}
"""Every format that can be written; all of them are read."""


def format_of(name: str) -> Format:
    """The format of this name. Raises CheckpointError for another one."""
    if name in FORMATS:
        return FORMATS[name]
    raise CheckpointError(f"a checkpoint in the format {name!r}", "no such format", "files have one of three formats",
                          f"one of {', '.join(FORMATS)}")  # fmt: skip


def open_checkpoint(path: str | os.PathLike[str]) -> Catalogue:
    """Return what a file or folder holds; of a folder of steps, the latest complete one.

    Raises CheckpointFileError where there is no checkpoint, or one whose description is damaged, and ReadTimeoutError
    where the file system does not answer.
    """
    place = Path(path).absolute()
    return timed(lambda: _opened(place))


def _opened(place: Path) -> Catalogue:
    if is_file(place):
        alone = place.suffix != ".json"
        found = replace(read_single(place), alone=True) if alone else read_index(place)
        return with_checksums(found, place.name if alone else None)
    names = names_in(place)
    if MANIFEST in names:
        return read_manifest(place)
    if METADATA in names:
        return with_checksums(read_dcp(place))
    step = latest(place)
    found = read_manifest(step) if step is not None else find_hub(place)
    if found is None:
        what = "a folder of something else" if is_folder(place) else "no such file or folder"
        raise bad_file(place, what, f"there is no {MANIFEST}, no {METADATA}, no safetensors file and no complete step",
                       "the path of a checkpoint, or of a folder with steps of one")  # fmt: skip
    return found if step is not None else with_checksums(found)


def open_together(path: str | os.PathLike[str]) -> Catalogue:
    """What a path holds, the same for all ranks, which all call it; what is being written is complete before."""
    ranks = world()
    finish_earlier(ranks)
    found: list[Catalogue] = []

    def act() -> str:
        found.append(open_checkpoint(path))
        return str(found[0].folder)

    folder, folders = ranks.agreed(act)
    if folder == folders[0]:
        return found[0]
    return open_checkpoint(folders[0])  # a step that was completed while some ranks looked


def verify(path: str | os.PathLike[str]) -> Catalogue:
    """Return what a path holds, once every file and every tensor in it has been looked at.

    Raises CheckpointFileError for the first file that is not what it was.
    """
    catalogue = open_checkpoint(path)
    timed(lambda: _verify(catalogue))
    return catalogue


def _verify(catalogue: Catalogue) -> None:
    check_sizes(catalogue)
    check_files(catalogue, sorted(catalogue.files))
    check_pieces(catalogue, [(name, piece) for name, entry in catalogue.entries.items() for piece in entry.pieces])
