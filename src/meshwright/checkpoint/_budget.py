"""A bound on the memory that the description of a checkpoint may take.

A few bytes of a description can ask for gigabytes. So a reader counts what it is about to make: at most 64 MiB, and
more only as far as the folder's files take up room on the disk, since a description of much data may be long.
"""

from __future__ import annotations

from pathlib import Path

from ._errors import bad_file
from ._files import names_in, status

LARGEST = 64 << 20
"""Bytes of memory that any description may take."""
PER_BYTE = 4
"""Bytes of memory beyond that for each byte of the folder's files."""


class Budget:
    """Bytes of memory that are left for the description in a file."""

    def __init__(self, path: Path) -> None:
        self.path, self._spent, self._bound = path, 0, LARGEST

    def spend(self, nbytes: int, what: str) -> None:
        """Count `nbytes` for `what`. Raises CheckpointFileError beyond the bound."""
        self._spent += nbytes
        if self._spent <= self._bound:
            return
        self._bound = LARGEST + PER_BYTE * _on_disk(self.path.parent)
        if self._spent > self._bound:
            raise bad_file(
                self.path, f"{what}, which would take {self._spent} bytes of memory",
                f"the bound is {self._bound}: {LARGEST} and {PER_BYTE} for each byte of the folder's files",
            )  # fmt: skip


def _on_disk(folder: Path) -> int:
    """Return the bytes that the files of a folder take up on the disk: holes of sparse files count nothing."""
    found = [status(folder / name) for name in names_in(folder)]
    return sum(min(s.st_size, 512 * s.st_blocks) for s in found if s is not None)
