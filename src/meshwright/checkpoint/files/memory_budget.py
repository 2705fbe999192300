"""A bound on the memory for the description of a checkpoint.

A few bytes of a description can ask for gigabytes. So a reader counts the memory before it allocates it. The bound is
64 MiB, plus a multiple of the disk space of the folder's files, since the description of much data may be long.
"""

from __future__ import annotations

from pathlib import Path

from .._errors import file_error
from .file_operations import names_in, status

LARGEST = 64 << 20
"""Most bytes of memory for any description, whatever the size of the files."""
PER_BYTE = 4
"""Further bytes of memory for each byte of the folder's files."""


class Budget:
    """The memory left for the description in a file."""

    def __init__(self, path: Path) -> None:
        self.path, self._spent, self._bound = path, 0, LARGEST

    def spend(self, nbytes: int, what: str) -> None:
        """Count `nbytes` for `what`. Raises CheckpointFileError if that exceeds the bound."""
        self._spent += nbytes
        if self._spent <= self._bound:
            return
        self._bound = LARGEST + PER_BYTE * _on_disk(self.path.parent)
        if self._spent > self._bound:
            raise file_error(
                self.path,
                f"{what}, which would take {self._spent} bytes of memory",
                f"the bound is {self._bound} bytes: {LARGEST}, plus {PER_BYTE} for each byte of the folder's files",
            )


def _on_disk(folder: Path) -> int:
    """Return the disk space of a folder's files in bytes, without the holes of sparse files."""
    found = [status(folder / name) for name in names_in(folder)]
    return sum(min(s.st_size, 512 * s.st_blocks) for s in found if s is not None)
