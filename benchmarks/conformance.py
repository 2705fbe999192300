"""Checks of `meshwright conformance` that are not ok, on the CPU and on the test device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GOAL = 300
DEVICES = {"cpu": [], "mesh": [ROOT, ROOT / "tests" / "device" / "vendor"]}
"""Type of device → folders with the package of its vendor, whose entry point names the platform."""
QUICK = ["--level", "0"]


def report_of(device: str, quick: bool) -> dict[str, Any]:
    """Return the object that the command prints."""
    command = [sys.executable, "-m", "meshwright", "conformance", "--json", "--processes", "4", "--device", device]
    folders = [*map(str, DEVICES[device]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        command + (QUICK if quick else []),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return json.loads(done.stdout)


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: failed checks by device; checks that do not apply to a device do not count."""
    reports = {device: report_of(device, quick) for device in DEVICES}
    failed = {
        device: [f"{each['name']}: {each['state']} {each['detail']}" for each in report["results"] if _failed(each)]
        for device, report in reports.items()
    }
    counts = {device: report["counts"] for device, report in reports.items()}
    fewest = min(count.get("ok", 0) for count in counts.values())
    return {
        "name": "conformance",
        "value": {device: f"{len(failed[device])} of {sum(counts[device].values())}" for device in DEVICES},
        "goal": f"0 checks not ok, of at least {GOAL} on each device",
        "ok": not any(failed.values()) and (quick or fewest >= GOAL),
        "details": {"counts": counts, "failed": failed, "machines": {d: r["machine"] for d, r in reports.items()}},
    }


def _failed(result: dict[str, Any]) -> bool:
    return result["state"] not in ("ok", "not run")
