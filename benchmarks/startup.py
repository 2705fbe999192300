"""Processor seconds of the start of each command of `meshwright`, and of the import; the least of three starts.

The files of the package are compiled before, as they are after `pip install`.
"""

from __future__ import annotations

import compileall
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import meshwright
from meshwright.cli.commands.main import COMMAND_FUNCTIONS

MOST_WITHOUT_TORCH, MOST_WITH_TORCH = 0.4, 2.0
STARTS = 3
WITHOUT_TORCH = (
    *("--help", "--version", *(f"{command} --help" for command in COMMAND_FUNCTIONS)),
    *("schedule list", "schedule 1F1B"),
)


def run(quick: bool = False) -> dict[str, Any]:
    """Return the slowest start with torch; `quick` starts each command once."""
    starts = 1 if quick else STARTS
    compileall.compile_dir(Path(meshwright.__file__).parent, quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        save_file({"weight": torch.zeros(2)}, Path(folder) / "model.safetensors")
        with_torch = {"checkpoint inspect": of_command(f"checkpoint inspect {folder}", starts)}
    with_torch["import meshwright as mw; mw.simulate"] = of_program("import meshwright as mw; mw.simulate", starts)
    torch_alone = of_program("import torch", starts)
    without = {line: of_command(line, starts) for line in WITHOUT_TORCH}
    without["import meshwright as mw; mw.Shard"] = of_program("import meshwright as mw; mw.Shard", starts)
    return {
        "name": "startup",
        "value": max(with_torch.values()),
        "goal": f"at most {MOST_WITHOUT_TORCH} s without torch, and {MOST_WITH_TORCH} s for commands that need torch",
        "ok": max(without.values()) <= MOST_WITHOUT_TORCH and max(with_torch.values()) <= MOST_WITH_TORCH,
        "rival": {"name": "import torch", "value": torch_alone},
        "details": {"with torch": with_torch, "without torch": without},
    }


def of_command(line: str, starts: int) -> float:
    """Return the least processor seconds of so many starts of `meshwright` with these arguments."""
    return least_seconds([sys.executable, "-m", "meshwright", *line.split()], starts)


def of_program(text: str, starts: int) -> float:
    """Return the least processor seconds of so many starts of a Python program."""
    return least_seconds([sys.executable, "-c", text], starts)


def least_seconds(command: list[str], starts: int) -> float:
    """Return the least processor seconds of so many starts, which other work on the machine hardly changes."""
    return round(min(processor_seconds(command) for _ in range(starts)), 2)


def processor_seconds(command: list[str]) -> float:
    """Return the processor seconds of a process. Raises if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    compiled_once = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run(command, env=compiled_once, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
