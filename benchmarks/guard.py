"""Cost of the checks between ranks: share of a small training step, and time of single all-reduces.

Two real processes make training steps of a Llama (2 layers of 256, 4 rows of 64 tokens a rank, AdamW), with all checks
and without any. Short blocks of both alternate in one run, so that both see the same machine. The checks compare calls
and their purposes, compare replicas, and test gradients for numbers that are not finite. Each figure is the first
quartile of its blocks, because other work on the machine only adds time.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.comm import ProcessCommunicator, init_process, launch
from meshwright.models import Llama, LlamaConfig
from meshwright.tensor.core.computation_numbers import follow

GOAL = 0.03
ELEMENTS = [1, 16 * 1024, 1024 * 1024]
LAYERS, BATCH, LENGTH, BLOCK = 2, 4, 64, 4
CALLS = ["off", "every", "16"]


def run(quick: bool = False) -> dict[str, Any]:
    """Return the larger share of a step, eager or static, that all checks take; times are in the details."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "figures.json"
        status = launch([__file__, str(path), "6" if quick else "40"], 2, timeout=300)
        found = json.loads(path.read_text()) if status == 0 else {}
    steps = found.get("steps", {})
    value = max((step["share"] for step in steps.values()), default=None)
    return {
        "name": "guard",
        "value": value,
        "goal": f"at most {GOAL} of a small training step, eager and static",
        "ok": value is not None and value <= GOAL,
        "details": {"unit": "ms a step, and µs a call; 2 processes, one host", **found},
    }


@contextmanager
def checks(communicator: ProcessCommunicator, on: bool) -> Generator[None]:
    """Turn all checks on, or all off, inside the context."""
    follow(on)
    mw.check_steps("stop" if on else "off", replicas=None if on else 0)
    with communicator.checking("every" if on else "off"):
        yield


def training_step(static: bool) -> Callable[[], object]:
    """Return a training step of a small model whose batch is sharded over both ranks."""
    torch.manual_seed(0)
    mesh = mw.init_mesh(dp=2)
    net = Llama(LlamaConfig(layers=LAYERS))
    mw.shard_layer(net, mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    data = mw.shard_tensor(torch.randint(0, 256, (2 * BATCH, LENGTH)), mesh, [mw.Shard(0)])
    if static:
        model = mw.to_static(net, None, None, optimizer)
        return lambda: model(data, data)

    def step() -> None:
        optimizer.zero_grad()
        net(data, data).backward()
        optimizer.step()

    return step


def share_of(communicator: ProcessCommunicator, step: Callable[[], object], rounds: int) -> dict[str, float]:
    """Return milliseconds of a step with and without checks, and the share that they take."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for at in range(2 * rounds + 2):
        with checks(communicator, at % 2 == 0):
            step()
            begin = time.perf_counter()
            for _ in range(BLOCK):
                step()
            times[at % 2 == 0].append((time.perf_counter() - begin) / BLOCK * 1e3)
    checked, bare = (statistics.quantiles(times[on][1:])[0] for on in (True, False))
    return {"checked_ms": round(checked, 3), "bare_ms": round(bare, 3), "share": round(checked / bare - 1, 4)}


def call_times(communicator: ProcessCommunicator, elements: int, rounds: int) -> dict[str, float]:
    """Return microseconds of one all-reduce for each method of comparing calls."""
    x = torch.ones(elements)
    found: dict[str, list[float]] = {check: [] for check in CALLS}
    for _ in range(rounds if elements < 2**18 else max(2, rounds // 4)):
        for check in CALLS:
            with communicator.checking(check):
                communicator.all_reduce(x, "sum", (0, 1))
                start = time.perf_counter()
                for _ in range(BLOCK):
                    communicator.all_reduce(x, "sum", (0, 1))
                found[check].append((time.perf_counter() - start) / BLOCK * 1e6)
    off, every, sampled = (round(statistics.quantiles(found[check])[0], 1) for check in CALLS)
    return {"off_us": off, "every_us": every, "every_16th_us": sampled, "overhead_us": round(every - off, 1)}


def main(path: str, rounds: int) -> None:
    """Run one of the two processes."""
    communicator = init_process(backend="gloo")
    assert isinstance(communicator, ProcessCommunicator)
    steps = {name: share_of(communicator, training_step(name == "static"), rounds) for name in ("eager", "static")}
    calls = {f"{elements * 4} B": call_times(communicator, elements, rounds) for elements in ELEMENTS}
    if communicator.rank == 0:
        Path(path).write_text(json.dumps({"steps": steps, "calls": calls}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1], int(sys.argv[2]))
    else:
        print(json.dumps(run()))
