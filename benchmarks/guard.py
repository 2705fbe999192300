"""What it costs to compare calls before each collective: two real processes, all-reduces of 4 B to 4 MB.

Short blocks with and without the guard alternate in one run, so that both see the same machine; each figure is the
first quartile of its blocks, since whatever else the machine does only ever adds.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from meshwright.comm import ProcessCarrier, init_process, launch

GOAL_US = 150.0
ELEMENTS = [1, 1024, 16 * 1024, 256 * 1024, 1024 * 1024]
CHECKS = ["off", "every", "16"]
BLOCK = 20


def run(quick: bool = False) -> dict[str, Any]:
    """The cost of the guard per call in µs, for the smallest all-reduce; every size stands in the details."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "figures.json"
        status = launch([__file__, str(path), "8" if quick else "40"], 2, timeout=120)
        sizes = json.loads(path.read_text()) if status == 0 else {}
    value = next(iter(sizes.values()))["overhead_us"] if sizes else None
    return {
        "name": "guard",
        "value": value,
        "goal": f"at most {GOAL_US:.0f} µs more for an all-reduce of 4 B",
        "ok": value is not None and value <= GOAL_US,
        "details": {"unit": "µs per checked call, 2 processes, one host", "sizes": sizes},
    }


def measure(carrier: ProcessCarrier, elements: int, rounds: int) -> dict[str, float]:
    """µs of one all-reduce under each check."""
    x = torch.ones(elements)
    found: dict[str, list[float]] = {check: [] for check in CHECKS}
    for _ in range(rounds if elements < 2**18 else rounds // 4):
        for check in CHECKS:
            with carrier.checking(check):
                carrier.all_reduce(x, "sum", (0, 1))
                start = time.perf_counter()
                for _ in range(BLOCK):
                    carrier.all_reduce(x, "sum", (0, 1))
                found[check].append((time.perf_counter() - start) / BLOCK * 1e6)
    off, every, sampled = (statistics.quantiles(found[check])[0] for check in CHECKS)
    return {
        "off_us": round(off, 1),
        "every_us": round(every, 1),
        "every_16th_us": round(sampled, 1),
        "overhead_us": round(every - off, 1),
    }


def main(path: str, rounds: int) -> None:
    """One of the two processes."""
    carrier = init_process(backend="gloo")
    sizes = {f"{elements * 4} B": measure(carrier, elements, rounds) for elements in ELEMENTS}
    if carrier.rank == 0:
        Path(path).write_text(json.dumps(sizes))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1], int(sys.argv[2]))
    else:
        print(json.dumps(run()))
