"""Processor minutes of the whole test suite, and its slowest test."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import _test_seconds

ROOT = Path(__file__).parents[1]
MOST_MINUTES, MOST_SECONDS, LISTED = 12, 10, 40


def run(quick: bool = False) -> dict[str, Any]:
    """Return the minutes of all tests, or of those of `layout` if `quick`, as `make test` runs them."""
    tests = ["tests/layout"] if quick else []
    settings = ["--hypothesis-profile=ci", "-n", "logical", "--maxprocesses", "8", "--dist", "worksteal"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds.json"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", _test_seconds.__name__, *settings, *tests],
            cwd=ROOT,
            env=os.environ | {_test_seconds.FILE: str(path)},
            stdout=sys.stderr,
            check=False,
        )
        seconds: dict[str, float] = json.loads(path.read_text())
    by_file: dict[str, float] = {}
    for test, spent in seconds.items():
        name = test.partition("::")[0]
        by_file[name] = by_file.get(name, 0.0) + spent
    spent_in_all = resource.getrusage(resource.RUSAGE_CHILDREN)
    minutes = (spent_in_all.ru_utime + spent_in_all.ru_stime) / 60
    slowest = sorted(seconds, key=lambda test: -seconds[test])
    return {
        "name": "test_time",
        "value": round(minutes, 1),
        "goal": f"at most {MOST_MINUTES} processor minutes, no test above {MOST_SECONDS} s, all pass",
        "ok": minutes <= MOST_MINUTES and seconds[slowest[0]] <= MOST_SECONDS and done.returncode == 0,
        "details": {
            "tests": len(seconds),
            "exit code": done.returncode,
            "minutes in tests": round(sum(seconds.values()) / 60, 1),
            "slowest": {test: round(seconds[test], 1) for test in slowest[:LISTED]},
            "files": {name: round(spent, 1) for name, spent in sorted(by_file.items(), key=lambda file: -file[1])},
        },
    }
