"""Convert a checkpoint to another format in one process, tensor by tensor: the model need not fit into memory."""

from __future__ import annotations

import os
from pathlib import Path

from meshwright.layout import Spec, replicated

from .._errors import CheckpointError
from ..contents.catalogue import Catalogue
from ..contents.part_writers import assign_writers
from ..contents.rank_world import World
from ..files.file_operations import with_time_limit
from ..files.json_values import encode_value
from ..formats.file_check import check_files
from ..formats.format_interface import Format
from ..formats.manifest import check_sizes
from ..formats.safetensors_file import check_dtype
from ..formats.saved_state import StateTable
from .load import read_whole
from .save import begin_save


def convert(source: Catalogue, path: str | os.PathLike[str], format: Format, only: str = "") -> Path:
    """Write the content of `source` in another format, into the new folder `path`.

    With `only`, convert the tensors whose names begin with that name and a dot, which are removed, and no values.

    Raises:
        CheckpointError: the format cannot hold the content, or no name has the prefix.
        CheckpointFileError: the source is damaged.
    """
    with_time_limit(lambda: check_sizes(source))
    with_time_limit(lambda: check_files(source, sorted(source.files)))
    prefix = f"{only.removesuffix('.')}." if only else ""
    names = {name.removeprefix(prefix): name for name in source.entries if name.startswith(prefix)}
    if not names:
        raise CheckpointError(
            f"the tensors {prefix}… of {source.folder}",
            f"none of {len(source.entries)} tensors",
            f"no name begins with {prefix!r}",
            f"use one of {', '.join([*source.entries][:3])}",
        )
    here = World()
    specs: dict[str, Spec] = {}
    for name, old in names.items():
        entry = source.entries[old]
        check_dtype(name, entry.dtype)
        specs[name] = Spec(here.mesh, replicated(len(entry.shape)), entry.shape, entry.dtype)
    values = {} if only else {name: encode_value(name, value) for name, value in source.values.items()}
    parts = {name: lambda old=old: read_whole(source, old) for name, old in names.items()}
    return begin_save(
        Path(path).absolute(), format, here, StateTable(specs, values), assign_writers(specs), lambda _: parts
    ).wait()
