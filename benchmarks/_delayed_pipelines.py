"""`python -m benchmarks._delayed_pipelines FILE SCHEDULE`: one of two processes that are the stages of a pipeline.

Operators sleep for a known time, and messages arrive late by a known time. So the step takes the time that
`simulate_schedule` predicts, on any machine, apart from the time of the host.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.comm import CommCall, DelayedCommunicator, current_communicator, launch, using_communicator
from meshwright.pipeline import Schedule, Times, simulate_schedule

from ._virtual_pipelines import OverlappedPipeline, TimedStep

ROOT = Path(__file__).parents[1]
STAGES, MICROBATCHES, WIDTH = 2, 4, 4
WORK, LATENCY = 0.2, 0.1
"""Seconds of a forward or a backward pass of a microbatch in a stage, and seconds of a message."""
BANDWIDTH = 1e12
BESIDE_SCHEDULE = ("all_reduce", "all_gather", "exchange")
"""Collectives of a step: the loss, and the checks before the update. No schedule hides them."""
WARM_UP, TURNS = 1, 3


@torch.library.custom_op("overlap::work", mutates_args=())
def work(x: Tensor) -> Tensor:
    """Return a copy after the seconds of a pass."""
    time.sleep(WORK)
    return x.clone()


work.register_fake(torch.empty_like)
work.register_autograd(lambda _, grad: work(grad))
mw.register_rule("overlap.work", "r c -> r c")


class _Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return work(self.linear(x))


class _Waiting(DelayedCommunicator):
    """A communicator whose senders wait until their messages have arrived: nothing overlaps."""

    def _send(self, x: Tensor, call: CommCall) -> None:
        super()._send(x, call)
        time.sleep(self.latency)


def delayed_pipeline(schedule: str) -> OverlappedPipeline:
    """Return a step of the first of two processes, without and with overlap."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        status = launch(
            ["-m", "benchmarks._delayed_pipelines", str(path), schedule], STAGES, {"PYTHONPATH": paths}, timeout=120
        )
        if status:
            raise RuntimeError(f"the processes ended with status {status}")
        found = json.loads(path.read_text())
    without, overlapped = (
        TimedStep(found[name]["seconds"], tuple(found[name]["losses"])) for name in ("without", "overlapped")
    )
    return OverlappedPipeline(without, overlapped, found["bound"], found["predicted"])


def _predicted(schedule: Schedule, overlaps: bool) -> float:
    """Return the seconds of a step that `simulate_schedule` predicts."""
    last = STAGES - 1
    if overlaps:
        return simulate_schedule(schedule, Times(WORK, WORK, 0.0, transfer=LATENCY)).makespan
    forward = tuple(WORK + LATENCY * (c < last) for c in range(STAGES))
    backward = tuple(WORK + LATENCY * (c > 0) for c in range(STAGES))
    return simulate_schedule(schedule, Times(forward, backward, 0.0)).makespan


def _trained(schedule: str) -> tuple[list[float], list[float], Schedule, float]:
    """Return the seconds of the measured steps, all losses, the table, and the seconds of a step's collectives."""
    torch.manual_seed(0)
    mesh = mw.ProcessMesh(range(STAGES), ["pp"])
    layers = nn.Sequential(*(_Stage() for _ in range(STAGES)))
    model = mw.split_pipeline(layers, mesh, axis="pp", batch=[mw.Replicate()])
    last = mesh["pp", STAGES - 1]

    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, mw.reshard(y, last, [mw.Replicate()]))

    options = {"enable": True, "accumulate_steps": MICROBATCHES, "schedule_mode": schedule}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = mw.to_static(model, None, loss_of, optimizer, mw.Strategy.of(pipeline=options))
    x, y = (torch.linspace(-1, 2, MICROBATCHES * WIDTH).view(MICROBATCHES, WIDTH).add(k).sin() for k in range(2))
    with current_communicator().seen.record_calls() as calls:
        seconds, losses = zip(*(_timed(lambda: step(x, y)) for _ in range(WARM_UP + TURNS)), strict=True)
    collectives = sum(call.kind in BESIDE_SCHEDULE for call in calls) / len(seconds)
    assert step.pipeline is not None
    return [*seconds[WARM_UP:]], [*losses], step.pipeline.schedule, collectives * LATENCY


def _timed(step: Callable[[], Tensor]) -> tuple[float, float]:
    current_communicator().barrier(tuple(range(STAGES)))
    begin = time.perf_counter()
    loss = float(step())
    return time.perf_counter() - begin, loss


def main(path: Path, schedule: str) -> None:
    inner = mw.init_process()
    found: dict[str, Any] = {}
    for name, kind in (("without", _Waiting), ("overlapped", DelayedCommunicator)):
        with using_communicator(kind(inner, LATENCY, BANDWIDTH)):
            seconds, losses, table, beside = _trained(schedule)
        found[name] = {"seconds": median(seconds), "losses": losses}
        found["bound"] = _predicted(table, overlaps=True) + beside
        found["predicted"] = _predicted(table, overlaps=False) + beside - found["bound"]
    if inner.rank == 0:
        path.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
