"""Pipelines: cost of an action on its host, and a step beside torch.distributed.pipelining.

The cost of an action is that of a row with small tensors, on one rank for which nothing is sent, divided by its
actions. Steps are those of one model under one schedule on two processes (Gloo, one thread each), forward, backward
and update. Both libraries take turns in the same processes. A ratio is the median over the turns. Each step is measured
twice: our ranks share memory, or not.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks._transports import GLOO, TRANSPORTS, environment
from meshwright.comm import PeerlessCommunicator, current_communicator, init_process, launch, using_communicator
from meshwright.pipeline import KNOWN_SCHEDULES

ACTION_GOAL_US, BUBBLE_GOAL, FLUSH_GOAL = 100.0, 0.9, 1.0
ROOT = Path(__file__).parents[1]
RANKS, MICROBATCHES = 2, 8
Step = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True, slots=True)
class Size:
    """Width of a layer, layers of a chunk, rows of a microbatch; steps in a turn, and turns."""

    width: int
    layers: int
    rows: int
    steps: int
    turns: int


SIZES = {"overhead": Size(32, 2, 4, 10, 30), "compute": Size(512, 4, 128, 2, 20)}
SCHEDULES = {
    "1F1B": ((0, 1), "Schedule1F1B"),
    "ZB-V": ((0, 1, 1, 0), "ScheduleZBVZeroBubble"),
    "Interleaved zero bubble": ((0, 1, 0, 1), "ScheduleInterleavedZeroBubble"),
}


def chunk(size: Size) -> nn.Sequential:
    layers = [nn.Linear(size.width, size.width) for _ in range(size.layers)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))


def chunks(size: Size, count: int) -> list[nn.Sequential]:
    torch.manual_seed(1)
    return [chunk(size) for _ in range(count)]


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


class Chain(nn.Module):
    """The chunks, each on its stage."""

    def __init__(self, parts: list[nn.Sequential], way: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        homes = [mw.ProcessMesh([stage], ["dp"]) for stage in range(max(way) + 1)]
        self.homes = [homes[stage] for stage in way]

    def forward(self, x: Tensor) -> Tensor:
        for n, part in enumerate(self.parts):
            x = mw.reshard(x, self.homes[n], [mw.Replicate()])
            x = part(mw.pipe_split(x) if n and self.homes[n] is self.homes[n - 1] else x)
        return x

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        return loss_of(out, mw.reshard(target, self.homes[-1], [mw.Replicate()]))


def our_step(size: Size, schedule: str, microbatches: int = MICROBATCHES, ranks: int = RANKS) -> Step:
    way = KNOWN_SCHEDULES[schedule].build(ranks, microbatches, 2).ways[0]
    model = Chain(chunks(size, len(way)), way)
    options = {"enable": True, "schedule_mode": schedule, "accumulate_steps": microbatches}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mw.to_static(model, None, model.loss, optimizer, mw.Strategy.of(pipeline=options))


def torch_step(size: Size, schedule: str) -> Step:
    """Return the same step with torch.distributed.pipelining; it returns the loss on the rank that has it."""
    from torch.distributed import pipelining

    way, kind = SCHEDULES[schedule]
    rank, parts = current_communicator().rank, chunks(size, len(way))
    own = [n for n, stage in enumerate(way) if stage == rank]
    stages = [pipelining.PipelineStage(parts[n], n, len(way), torch.device("cpu")) for n in own]
    optimizer = torch.optim.SGD([p for n in own for p in parts[n].parameters()], lr=0.1)
    make = getattr(pipelining, kind, None) or getattr(pipelining.schedules, kind)
    runs = make(stages[0] if len(own) == 1 else stages, MICROBATCHES, loss_fn=loss_of)

    def step(x: Tensor, target: Tensor) -> Any:
        losses: list[Tensor] = []
        given = (x,) if 0 in own else ()
        more = {"target": target, "losses": losses} if len(way) - 1 in own else {}
        runs.step(*given, **more)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if losses else None

    return step


def batch(size: Size, number: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(number)
    shape = (size.rows * MICROBATCHES, size.width)
    return torch.randn(shape, generator=g), torch.randn(shape, generator=g)


# --- one of the processes ----------------------------------------------------------------------------------------


def main(path: str, name: str, schedule: str, turns: str) -> None:
    """Run one rank: the first steps of both, then turns; the rank with the loss compares, rank 0 writes."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    init_process(backend="gloo")
    size = SIZES[name]
    steps = {"ours": our_step(size, schedule), "torch": torch_step(size, schedule)}
    losses = {who: [step(*batch(size, n)) for n in range(3)] for who, step in steps.items()}
    apart = [
        abs(float(a) - float(b)) / abs(float(b))
        for a, b in zip(losses["ours"], losses["torch"], strict=True)
        if b is not None
    ]
    times = in_turns(steps, size, int(turns))
    worst = torch.tensor(max(apart, default=0.0))
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
    table = torch.tensor([times["ours"], times["torch"]], dtype=torch.float64)
    torch.distributed.all_reduce(table, torch.distributed.ReduceOp.MAX)
    if current_communicator().rank == 0:
        ours, theirs = table.tolist()
        row = {
            "ours_ms": round(statistics.median(ours), 3),
            "torch_ms": round(statistics.median(theirs), 3),
            "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3),
            "loss_difference": float(f"{worst.item():.1e}"),
        }
        Path(path).write_text(json.dumps(row))
    torch.distributed.barrier()


def in_turns(steps: dict[str, Step], size: Size, turns: int) -> dict[str, list[float]]:
    """Return milliseconds per step of each in each turn; the first one alternates."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    gc.disable()
    for turn in range(turns):
        names = list(steps) if turn % 2 else list(reversed(steps))
        for name in names:
            gc.collect(0)
            torch.distributed.barrier()
            begin = time.perf_counter()
            for number in range(size.steps):
                steps[name](*batch(size, number % 3))
            torch.distributed.barrier()
            times[name].append((time.perf_counter() - begin) / size.steps * 1e3)
    gc.enable()
    return times


# --- the figure --------------------------------------------------------------------------------------------------


def action_us(quick: bool) -> float:
    """Return microseconds of an action of 1F1B, for the first of four ranks, none of which sends."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    microbatches, size = 32, Size(8, 1, 1, 0, 0)
    with using_communicator(PeerlessCommunicator(1, 4)):
        step = our_step(size, "ZB-H1", microbatches, 4)
        x = torch.randn(microbatches, size.width)
        for _ in range(3):
            step(x, x)
        times: list[float] = []
        for _ in range(5 if quick else 50):
            begin = time.perf_counter()
            step(x, x)
            times.append(time.perf_counter() - begin)
    torch.set_num_threads(threads)
    return round(statistics.median(times) / (3 * microbatches) * 1e6, 1)


def measure(name: str, schedule: str, transport: str, quick: bool) -> dict[str, Any]:
    print(f"{name}, {schedule}, {transport} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        argv = ["-m", "benchmarks.pipeline_overhead", str(path), name, schedule, str(5 if quick else SIZES[name].turns)]
        found = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        env = {"PYTHONPATH": found, **environment(transport == GLOO)}
        status = launch(argv, RANKS, env, timeout=600)
        if status or not path.exists():
            return {"failed": f"the processes ended with status {status}"}
        return json.loads(path.read_text())


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: microseconds per action, and the largest ratios for zero-bubble tables and for 1F1B."""
    action = action_us(quick)
    rows = {f"{n}, {s}, {t}": measure(n, s, t, quick) for t in TRANSPORTS for n in SIZES for s in SCHEDULES}
    ratios = {where: row.get("ratio", float("inf")) for where, row in rows.items()}
    flush = max(r for where, r in ratios.items() if ", 1F1B, " in where)
    bubble = max(r for where, r in ratios.items() if ", 1F1B, " not in where)
    same = all(row.get("loss_difference", 1.0) <= 1e-5 for row in rows.values())
    return {
        "name": "pipeline_overhead",
        "value": action,
        "goal": f"at most {ACTION_GOAL_US:g} us per action; ours / torch at most {BUBBLE_GOAL} for zero-bubble tables, "
        f"{FLUSH_GOAL} for 1F1B",
        "ok": action <= ACTION_GOAL_US and bubble <= BUBBLE_GOAL and flush <= FLUSH_GOAL and same,
        "rival": {"ours / torch.distributed.pipelining": {"zero bubble": bubble, "1F1B": flush}},
        "details": {"steps": rows},
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
