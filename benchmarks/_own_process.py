"""A case of a benchmark in a process of its own, so that the peak of its memory can be measured."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any


def own_process(benchmark: str, *words: object) -> dict[str, Any]:
    """Return the JSON in the last line that `python -m benchmarks.BENCHMARK WORD…` prints."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *map(str, words)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def peak_gibibytes() -> float:
    """Return the peak memory of this process in GiB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
