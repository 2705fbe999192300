"""Time of a checked all-reduce between two processes of one host, divided by that of unchecked Gloo.

Both run in the same two processes, in short blocks that alternate. Each figure is the first quartile of its blocks. Our
all-reduce uses memory that the processes share; with MESHWRIGHT_SHARED_MEMORY=off it uses Gloo, with checks.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm import Communicator, init_process, launch

GOAL = 1.0
ELEMENTS = [1, 1024, 16 * 1024, 256 * 1024, 1024 * 1024]
BLOCK = 20
GRADIENTS, GRADIENT = 4, 8 * 1024 * 1024
"""Number and size of the results that are kept at one time, as gradients in a training step."""


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the worst ratio over all sizes of our time to Gloo's."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "figures.json"
        status = launch([__file__, str(path), "8" if quick else "40"], 2, timeout=300)
        found: dict[str, Any] = json.loads(path.read_text()) if status == 0 else {"sizes": {}, "kept": {}}
    sizes = found["sizes"]
    value = max((row["ratio"] for row in sizes.values()), default=None)
    return {
        "name": "all_reduce",
        "value": value,
        "goal": f"at most {GOAL} of the time of Gloo's",
        "ok": value is not None and value <= GOAL,
        "rival": {"name": "torch.distributed, Gloo", "value": 1.0},
        "details": {"unit": "µs a call, 2 processes on one host, one thread each", **found},
    }


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return µs of one call for each of the methods, and our share of Gloo's time."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            start = time.perf_counter()
            for _ in range(BLOCK):
                call()
            found[name].append((time.perf_counter() - start) / BLOCK * 1e6)
    us = {name: round(statistics.quantiles(times)[0], 1) for name, times in found.items()}
    return {**us, "ratio": round(us["ours"] / us["gloo"], 3)}


def results_kept(communicator: Communicator, rounds: int) -> dict[str, float]:
    """Return µs of a call whose result is kept: in new memory, and in the memory of its operand."""
    found: dict[str, list[float]] = {"in new memory": [], "over the operand": []}
    for _ in range(rounds):
        for name, times in found.items():
            over = name == "over the operand"
            operands = [torch.ones(GRADIENT) for _ in range(GRADIENTS)]
            communicator.barrier((0, 1))
            start = time.perf_counter()
            results = [communicator.all_reduce(x, "sum", (0, 1), over) for x in operands]
            times.append((time.perf_counter() - start) / len(results) * 1e6)
    return {name: round(statistics.quantiles(times)[0], 1) for name, times in found.items()}


def main(path: str, rounds: int) -> None:
    """Run one of the two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    communicator = init_process(backend="gloo")
    sizes: dict[str, dict[str, float]] = {}
    for elements in ELEMENTS:
        x = torch.ones(elements)
        calls: dict[str, Callable[[], object]] = {
            "ours": partial(communicator.all_reduce, x, "sum", (0, 1)),
            "gloo": partial(dist.all_reduce, x),
        }
        sizes[f"{elements * 4} B"] = measure(calls, rounds if elements < 2**18 else rounds // 4)
    kept = results_kept(communicator, rounds)
    if communicator.rank == 0:
        Path(path).write_text(json.dumps({"sizes": sizes, "kept": kept}))
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1], int(sys.argv[2]))
    else:
        print(json.dumps(run()))
