"""A case of a benchmark in a process of its own, so that the peak of its memory is its own, too."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any


def own_process(benchmark: str, *words: object) -> dict[str, Any]:
    """What `python -m benchmarks.BENCHMARK WORD…` prints as the last line of its output, in JSON."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *map(str, words)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def peak_gibibytes() -> float:
    """The most memory that this process has held."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
