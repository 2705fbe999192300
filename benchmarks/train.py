"""The main job, `make train`: largest relative loss difference of 8 ranks (pp 2 x dp 2 x tp 2) from one device.

Both communicators run the command that `make train` runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

GOAL = 1e-4
COMMUNICATORS = {"simulated": [], "processes": ["--processes"]}


def run(quick: bool = False) -> dict[str, Any]:
    outcomes = {name: train(options, steps=5 if quick else 50) for name, options in COMMUNICATORS.items()}
    value = {name: outcome["largest_relative_difference"] for name, outcome in outcomes.items()}
    return {
        "value": value,
        "goal": f"<= {GOAL:g}",
        "ok": all(difference <= GOAL for difference in value.values()),
        "details": {
            name: {
                "steps": outcome["steps"],
                "first and last loss": [outcome["losses"][0], outcome["losses"][-1]],
                "first and last loss of one device": [outcome["one_device"][0], outcome["one_device"][-1]],
                "seconds": round(outcome["seconds"], 1),
                "seconds of one device": round(outcome["one_device_seconds"], 1),
            }
            for name, outcome in outcomes.items()
        },
    }


def train(options: list[str], steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "meshwright", "train", "--json", "--steps", str(steps), *options]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not finished.stdout.strip():
        raise RuntimeError(f"{' '.join(command)} ended with {finished.returncode} and without a result")
    return json.loads(finished.stdout.splitlines()[-1])
