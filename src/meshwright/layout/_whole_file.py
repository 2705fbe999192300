"""Atomic writing of files."""

from __future__ import annotations

import os
from pathlib import Path
from secrets import token_hex

from ._bounded_file import FileName


def write_whole(path: FileName, data: bytes) -> None:
    """Write a file atomically: after a crash, the file is complete or has its old content.

    For a link, the target is written and the link stays. Anything that is no regular file, such as `/dev/null` or a
    pipe, is written to directly.
    """
    place = Path(os.path.realpath(path))
    if Path(path).exists() and not (place.is_file() or place.is_dir()):
        Path(path).write_bytes(data)
        return
    beside = place.with_name(f".{place.name}.{token_hex(8)}")
    try:
        with open(beside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, place)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    folder = os.open(place.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # make the new name durable
    finally:
        os.close(folder)
