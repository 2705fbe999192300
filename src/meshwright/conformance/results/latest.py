"""The latest results of this machine: a file for each type of device and level, in the user's cache folder."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from meshwright.layout import InputError, read_json, read_text_file, write_whole

from .result import Facts, Report, Result

_NAME = "level-{}.json"
_LEVELS = range(6)


@dataclass(frozen=True, slots=True)
class LatestResult:
    """The latest run of one level: its day, the machine, the number of results by state, and the failed checks."""

    level: int
    on: str
    facts: Facts
    counts: Mapping[str, int]
    failed: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.failed


def results_folder(device: str) -> Path:
    """Return the folder with the latest results of a type of device."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "meshwright" / "conformance" / device


def keep_results(report: Report) -> None:
    """Write the results of each level of a report; nothing if no worker started, or if the folder is not writable."""
    if report.facts is None:
        return
    folder = results_folder(report.facts.device)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for level in {each.level for each in report.results}:
            found = [each for each in report.results if each.level == level]
            latest = _latest(level, report.on, report.facts, found)
            write_whole(folder / _NAME.format(level), json.dumps(asdict(latest)).encode())


def _latest(level: int, on: str, facts: Facts, results: Sequence[Result]) -> LatestResult:
    counts = Counter(each.state for each in results)
    return LatestResult(level, on, facts, dict(counts), tuple(each.name for each in results if each.failed))


def latest_results(device: str) -> list[LatestResult]:
    """Return the latest results of a type of device on this machine, by level, for levels that have a readable file."""
    found: list[LatestResult] = []
    for level in _LEVELS:
        with suppress(InputError, TypeError, ValueError, KeyError, AttributeError):  # a file of another program
            found.append(_read(results_folder(device) / _NAME.format(level)))
    return found


def _read(path: Path) -> LatestResult:
    data = cast(dict[str, Any], read_json(read_text_file(path)))
    facts = cast(dict[str, Any], data["facts"])
    facts["dtypes"] = tuple(facts["dtypes"])
    failed = tuple(str(name) for name in data["failed"])
    counts = {str(state): int(count) for state, count in data["counts"].items()}
    return LatestResult(int(data["level"]), str(data["on"]), Facts(**facts), counts, failed)
