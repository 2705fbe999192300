"""Write the table of the latest conformance results by platform into `docs/how-to/check-a-device.md`.

`python -m benchmarks.platforms [REPORT ...]` first stores the reports, which are outputs of
`meshwright conformance --json`. The figures `conformance` and `gpu` give the results of their devices too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "how-to" / "check-a-device.md"
RESULTS = HERE / "results.json"
STORE = HERE / "platforms.json"
MARK = "<!-- platforms -->"
TITLES = {
    "cpu": "CPU",
    "mesh": "[test device](../../tests/device/README.md) of the repository",
    "cuda": "NVIDIA GPUs (`cuda`)",
    "rocm": "AMD GPUs (`cuda` of a ROCm build)",
    "xpu": "Intel GPUs (`xpu`)",
    "npu": "Ascend NPUs (`npu`)",
    "mps": "Apple GPUs (`mps`)",
}
"""Platform → its title; other platforms come after these, under their own names."""


class Row(NamedTuple):
    """The latest results of one device."""

    platform: str
    device: str
    on: str
    versions: str
    levels: str
    counts: Mapping[str, int]
    failed: Sequence[str]

    @property
    def result(self) -> str:
        """Return the result as the table has it."""
        total, left_out = sum(self.counts.values()), self.counts.get("not run", 0)
        parts = [f"{self.counts.get('ok', 0)} of {total} ok"]
        parts += [f"{left_out} {'does' if left_out == 1 else 'do'} not apply"] if left_out else []
        parts += [f"{len(self.failed)} failed ({'; '.join(self.failed)})"] if self.failed else []
        return ", ".join(parts)


def main(reports: Sequence[str]) -> None:
    rows = _stored() + [row_of_report(json.loads(Path(path).read_text())) for path in reports]
    if reports:
        STORE.write_text(json.dumps([row._asdict() for row in latest(rows)], indent=2) + "\n")
    PAGE.write_text(page())


def page(figures: Mapping[str, Any] | None = None) -> str:
    """Return the text of the page with the table of all stored results."""
    known: Mapping[str, Any] = json.loads(RESULTS.read_text())["figures"] if figures is None else figures
    before, _, after = PAGE.read_text().split(MARK)
    return f"{before}{MARK}\n{table(latest([*rows_of_figures(known), *_stored()]))}\n{MARK}{after}"


def row_of_report(report: Mapping[str, Any]) -> Row:
    """Return the row of an output of `meshwright conformance --json`."""
    results = report["results"]
    levels = sorted({each["level"] for each in results})
    failed = [each["name"] for each in results if each["state"] not in ("ok", "not run")]
    named = f"levels {levels[0]} to {levels[-1]}" if len(levels) > 1 else f"level {levels[0]}"
    return _row(report["machine"], report["on"], named, report["counts"], failed)


def rows_of_figures(figures: Mapping[str, Any]) -> list[Row]:
    """Return the rows of the figures `conformance`, for each of its devices, and `gpu`, for an accelerator."""
    found: list[Row] = []
    whole, gpu = figures.get("conformance"), figures.get("gpu")
    if whole is not None:
        details = whole["details"]
        for device, machine in details["machines"].items():
            failed = [text.partition(":")[0] for text in details["failed"][device]]
            found.append(_row(machine, whole["on"], "levels 0 to 5", details["counts"][device], failed))
    if gpu is not None and isinstance(gpu["value"], dict):
        machine, results = gpu["details"]["machine"], gpu["details"]["conformance"]
        facts = {"device": "cuda", "name": machine["device"], "count": 1, "torch": machine["torch"]}
        failed = [text.partition(":")[0] for text in results["failed"]]
        found.append(_row({**facts, "through_host": True}, gpu["on"], "levels 0 to 4", results["counts"], failed))
    return found


def _row(machine: Mapping[str, Any], on: str, levels: str, counts: Mapping[str, int], failed: Sequence[str]) -> Row:
    kind, torch = machine["device"], machine["torch"]
    platform = "rocm" if kind == "cuda" and "rocm" in torch else kind
    versions = ", ".join([f"torch {torch}", *([f"Python {machine['python']}"] if "python" in machine else [])])
    count = f"{machine['count']} devices" if machine["count"] > 1 else "1 device" if kind != "cpu" else ""
    device = ", ".join(filter(None, [machine["name"], count]))
    levels += ", processes through the host" if machine.get("through_host") else ""
    return Row(platform, device, on, versions, levels, counts, failed)


def latest(rows: Iterable[Row]) -> list[Row]:
    """Return the latest row of each device and levels; of one day, the last one."""
    found: dict[tuple[str, str, str], Row] = {}
    for row in sorted(rows, key=lambda row: row.on):
        found[row.platform, row.device, row.levels] = row
    return list(found.values())


def table(rows: Sequence[Row]) -> str:
    """Return the table of all platforms; those without a row were never run.

    >>> print(table([]).splitlines()[2])
    | CPU | never run | | | | |
    """
    lines = ["| platform | device | when | versions | checks | result |", "|---|---|---|---|---|---|"]
    for platform in dict.fromkeys([*TITLES, *(row.platform for row in rows)]):
        title, here = TITLES.get(platform, f"`{platform}`"), [row for row in rows if row.platform == platform]
        lines += [
            f"| {title} | {row.device} | {row.on} | {row.versions} | {row.levels} | {row.result} |" for row in here
        ]
        lines += [] if here else [f"| {title} | never run | | | | |"]
    return "\n".join(lines)


def _stored() -> list[Row]:
    return [Row(**row) for row in json.loads(STORE.read_text())] if STORE.exists() else []


if __name__ == "__main__":
    main(sys.argv[1:])
