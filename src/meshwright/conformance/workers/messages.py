"""Files between the command and its workers: a request, and the lines that each rank appends to its record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from meshwright.layout import read_json, read_text_file

TABLE = "meshwright.conformance:CHECKS"
REQUEST = "request.json"


@dataclass(frozen=True, slots=True)
class Request:
    """The checks that a worker runs: their keys, and the table in which they are, as "module:name".

    `through_host`: processes share the devices and communicate through the memory of the host.
    """

    device: str | None
    imports: tuple[str, ...]
    table: str
    processes: int
    checks: tuple[str, ...]
    folder: str
    through_host: bool = False

    def write(self) -> None:
        (Path(self.folder) / REQUEST).write_text(json.dumps(asdict(self)))


def read_request(folder: Path) -> Request:
    """Return the request that the command wrote into the folder."""
    found = cast(dict[str, Any], read_json(read_text_file(folder / REQUEST)))
    for name in ("imports", "checks"):
        found[name] = tuple(found[name])
    return Request(**found)


def record_path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


def trace_path(folder: Path, rank: int) -> Path:
    """Return the file into which faulthandler writes the stacks of a rank that hangs or crashes."""
    return folder / f"rank{rank}.trace"


class Record:
    """The file to which one rank appends a line at the start and at the end of each check."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = record_path(folder, rank).open("a")

    def append(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


class RecordReader:
    """The lines that a rank has appended since the last call of `lines`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._at = record_path(folder, rank), 0

    def lines(self) -> Sequence[Mapping[str, Any]]:
        """Return the complete new lines."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
