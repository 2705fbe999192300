"""Seconds from a clone to the first training step, in a new environment.

The repository is cloned, `make setup` installs what it needs (pip may use its cache), one step of the main job runs on
eight ranks and on one device. Then the README's first command runs as it stands there; its second is what continuous
integration runs for every commit.
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
GOAL = 300.0
"""Seconds: half of the first ten minutes."""
COMMAND = re.compile(r"^\$ (make \w+)", re.MULTILINE)


def run(quick: bool = False) -> dict[str, Any]:
    """The seconds until the first step; what each part took stands in the details."""
    first, second = COMMAND.findall((ROOT / "README.md").read_text())
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "meshwright"
        took = {"git clone": seconds(["git", "clone", "--quiet", str(ROOT), str(where)], Path(folder))}
        took["make setup"] = seconds(["make", "setup"], where)
        took["one step"] = seconds([".venv/bin/meshwright", "train", "--steps", "1"], where)
        value = round(sum(took.values()), 1)
        if not quick:
            took[first] = seconds(first.split(), where)
    return {
        "name": "first_minutes",
        "value": value,
        "goal": f"at most {GOAL:g} s from a clone to the first step; the README's commands work as printed",
        "ok": value <= GOAL and second == "make test",
        "details": {part: round(each, 1) for part, each in took.items()},
    }


def seconds(command: list[str], where: Path) -> float:
    """Seconds that a command takes; one that fails ends the benchmark."""
    known = {name: os.environ[name] for name in os.environ if name.startswith(("PIP_", "UV_", "LANG", "HOME", "SSL"))}
    path = os.environ["PATH"].replace(f"{Path(sys.executable).parent}:", "")
    start = time.perf_counter()
    subprocess.run(command, cwd=where, env={**known, "PATH": path}, stdout=sys.stderr, check=True)
    return time.perf_counter() - start
