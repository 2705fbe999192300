"""Seconds of a newcomer's first steps in an empty environment: installation, lines and commands of the README.

The repository is cloned, and each step is made as the README prints it, without any other step. pip may use its cache.
The time limit applies to the steps before the two commands for developers.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MOST_SECONDS = 60.0
CONSOLE = re.compile(r"^\$ ([^#\n]+)", re.MULTILINE)
LINES = re.compile(r"```python\n(.*?)```\s+```text\n(.*?)```", re.DOTALL)


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the seconds until the README's lines print its output; `quick` leaves out `make test`."""
    readme = (ROOT / "README.md").read_text()
    install, train, test = (command.strip() for command in CONSOLE.findall(readme))
    program, expected = LINES.findall(readme)[0]
    with tempfile.TemporaryDirectory() as folder:
        clone, environment = Path(folder) / "meshwright", Path(folder) / "environment"
        python = str(environment / "bin" / "python")
        took = {"git clone": seconds(["git", "clone", "--quiet", str(ROOT), str(clone)], Path(folder))}
        took["empty environment"] = seconds([sys.executable, "-m", "venv", str(environment)], Path(folder))
        pinned = {"PIP_CONSTRAINT": str(clone / "constraints.txt")}  # the CPU build of torch: CUDA adds gigabytes
        took[install] = seconds([python, "-m", *install.split()], clone, pinned)
        started = time.perf_counter()
        printed = subprocess.run([python, "-c", program], cwd=folder, capture_output=True, text=True, check=True).stdout
        took["the README's lines"] = time.perf_counter() - started
        value = sum(took.values())
        for command in [train] if quick else [train, test]:
            took[command] = seconds(command.split(), clone)
    return {
        "name": "sixty_seconds",
        "value": round(value, 1),
        "goal": f"at most {MOST_SECONDS:g} s from nothing to the README's result; its commands work as printed",
        "ok": value <= MOST_SECONDS and printed == expected,
        "details": {"printed": printed, **{part: round(each, 1) for part, each in took.items()}},
    }


def seconds(command: list[str], where: Path, more: dict[str, str] | None = None) -> float:
    """Return the seconds that a command takes in an environment with no trace of this one. Raises if it fails."""
    names = ("PIP_", "UV_", "LANG", "HOME", "SSL")
    known = {name: value for name, value in os.environ.items() if name.startswith(names)}
    path = os.environ["PATH"].replace(f"{Path(sys.executable).parent}:", "")
    start = time.perf_counter()
    subprocess.run(command, cwd=where, env={**known, "PATH": path, **(more or {})}, stdout=sys.stderr, check=True)
    return time.perf_counter() - start
