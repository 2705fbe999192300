"""Processor seconds of the start of each command of `meshwright`, and of the import; the least of three starts."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from meshwright.cli.commands.main import COMMAND_FUNCTIONS

MOST_WITHOUT_TORCH, MOST_WITH_TORCH = 0.4, 2.0
STARTS = 3
WITHOUT_TORCH = ("--help", "--version", *(f"{command} --help" for command in COMMAND_FUNCTIONS))


def run(quick: bool = False) -> dict[str, Any]:
    """Return the slowest start with torch; `quick` starts each command once."""
    starts = 1 if quick else STARTS
    with tempfile.TemporaryDirectory() as folder:
        save_file({"weight": torch.zeros(2)}, Path(folder) / "model.safetensors")
        with_torch = {
            line: least_seconds([sys.executable, "-m", "meshwright", *line.split()], starts)
            for line in ("schedule list", "schedule 1F1B", f"checkpoint inspect {folder}")
        }
    with_torch = {line.split("/")[0]: value for line, value in with_torch.items()}
    with_torch["import meshwright as mw; mw.Shard"] = least_seconds(
        [sys.executable, "-c", "import meshwright as mw; mw.Shard"], starts
    )
    torch_alone = least_seconds([sys.executable, "-c", "import torch"], starts)
    without = {
        line: least_seconds([sys.executable, "-m", "meshwright", *line.split()], starts) for line in WITHOUT_TORCH
    }
    return {
        "name": "startup",
        "value": max(with_torch.values()),
        "goal": f"at most {MOST_WITHOUT_TORCH} s for help, and {MOST_WITH_TORCH} s for commands that need torch",
        "ok": max(without.values()) <= MOST_WITHOUT_TORCH and max(with_torch.values()) <= MOST_WITH_TORCH,
        "rival": {"name": "import torch", "value": torch_alone},
        "details": {"with torch": with_torch, "without torch": without},
    }


def least_seconds(command: list[str], starts: int) -> float:
    """Return the least processor seconds of so many starts, which other work on the machine hardly changes."""
    return round(min(processor_seconds(command) for _ in range(starts)), 2)


def processor_seconds(command: list[str]) -> float:
    """Return the processor seconds of a process. Raises if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
