"""What lies at a path: one of our checkpoints, safetensors files, or a distributed checkpoint of torch."""

from __future__ import annotations

import os
from pathlib import Path

from ._catalogue import Catalogue
from ._dcp import METADATA, read_dcp
from ._dcp_format import DcpFormat
from ._errors import CheckpointError, bad_file
from ._format import Format, Manifested
from ._hub import HubFormat, find_hub, read_index, read_single
from ._load import check_files, read_whole
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
    """What a file or folder holds; of a folder of steps, the latest complete one.

    Raises CheckpointFileError where there is no checkpoint, or one whose description is damaged.
    """
    place = Path(path).absolute()
    if place.is_file():
        return read_index(place) if place.suffix == ".json" else read_single(place)
    if (place / MANIFEST).exists():
        return read_manifest(place)
    if (place / METADATA).exists():
        return read_dcp(place)
    step = latest(place)
    found = read_manifest(step) if step is not None else find_hub(place)
    if found is None:
        what = "a folder of something else" if place.is_dir() else "no such file or folder"
        raise bad_file(path, what, f"there is no {MANIFEST}, no {METADATA}, no safetensors file and no complete step",
                       "the path of a checkpoint, or of a folder with steps of one")  # fmt: skip
    return found


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
    """What a path holds, once every file and every tensor in it has been looked at.

    Raises CheckpointFileError for the first file that is not what it was.
    """
    catalogue = open_checkpoint(path)
    check_sizes(catalogue)
    check_files(catalogue, sorted(catalogue.files))
    for name in catalogue.entries:
        read_whole(catalogue, name)
    return catalogue
