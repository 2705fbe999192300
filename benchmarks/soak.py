"""Growth of memory over a long run with saves, loads and resizes, after every size has come once.

    python -m benchmarks soak              20,000 steps on two processes, then 1,000 on four simulated ranks
    python -m benchmarks.soak 2000         so many steps on processes, and a twentieth of them on simulated ranks

Blocks of eager and static steps alternate. Each block starts from the checkpoint that the other one wrote. There are
some hundreds of batch and sequence sizes. Each of them comes once in the first fifth of a run, which fills the caches.
The growth is that of a straight line through the later samples of resident memory, each taken after a full garbage
collection.

The figure is that of the processes. The run on simulated ranks also makes a new model every few loads. Its growth is
in the details; it includes memory that outlives a model, and caches that new models of the short run still fill.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import linear_regression
from typing import Any

from benchmarks._fault_runs import run_ranks
from benchmarks._soak_run import KEEP, LOAD, REMAKE, SAVE, SIZES

STEPS, QUICK = 20_000, 1000
GOAL = 6.0
"""MB: memory of entries that bounded caches still add, and the noise of resident memory."""
PROCESSES = 2
_HERE = "benchmarks._soak_run"
_START, _PER_STEP = 300.0, 0.3
"""Seconds that a run may take at most."""


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure."""
    return figure(QUICK if quick else STEPS)


def figure(steps: int) -> dict[str, Any]:
    """Return the largest growth of a process in MB, with the memory of each process."""
    on_processes = samples_of_processes("on_processes", PROCESSES, steps)
    simulated = samples_of_processes("on_simulated_ranks", 1, steps // 20)
    told = {f"process {rank}": about for rank, about in enumerate(on_processes)}
    told |= {f"4 simulated ranks in process {n}": about for n, about in enumerate(simulated)}
    value = max((about["growth_mb"] for about in on_processes), default=None)
    is_whole = len(on_processes) == PROCESSES and len(simulated) == 1
    return {
        "name": "soak",
        "value": value,
        "goal": f"at most {GOAL} MB over {STEPS} steps, once every size has come",
        "ok": value is not None and is_whole and value <= GOAL and steps >= STEPS,
        "details": {
            "steps": steps,
            "every": {"size": SIZES, "save": SAVE, "load": LOAD, "new model": LOAD * REMAKE, "kept": KEEP},
            **told,
        },
    }


def samples_of_processes(function: str, processes: int, steps: int, *intervals: int) -> list[dict[str, Any]]:
    """Return the samples of each process, with steps between saves and loads if given. RuntimeError if one failed."""
    found: list[dict[str, Any]] = []

    def read(run: Any) -> None:
        with_samples = sorted(Path(run.folder).glob("seen.*"))
        found.extend(summary(json.loads(path.read_text())) for path in with_samples)

    limit = _START + steps * _PER_STEP
    arguments = [str(number) for number in (steps, *intervals)]
    ended = run_ranks(f"{_HERE}:{function}", processes, arguments=arguments, limit=limit, also=read)
    for rank in ended:
        if rank.status:
            raise RuntimeError(f"rank {rank.rank}: status {rank.status}\n{rank.output[-3000:]}")
    return found


def summary(told: dict[str, Any]) -> dict[str, Any]:
    """Return the growth of one process, its first and last sample, and the caches that are not empty."""
    samples: list[dict[str, Any]] = told["samples"]
    used = {name: f"{n} of {most}" for name, (n, most) in told["caches"].items() if n}
    blocks = growth(samples, "blocks")
    return {
        "growth_mb": round(growth(samples, "resident"), 2),
        "growth_blocks": round(blocks),
        "first": samples[0],
        "last": samples[-1],
        "seconds": told["seconds"],
        "caches": used,
    }


def growth(samples: Sequence[dict[str, Any]], of: str) -> float:
    """Return by how much a number grows from the first to the last sample, by the straight line through all.

    >>> round(growth([{"step": n, "x": 5.0 + n / 10} for n in range(11)], "x"), 3)
    1.0
    """
    steps = [float(each["step"]) for each in samples]
    line = linear_regression(steps, [float(each[of]) for each in samples])
    return line.slope * (steps[-1] - steps[0])


if __name__ == "__main__":
    print(json.dumps(figure(int(sys.argv[1]))))
