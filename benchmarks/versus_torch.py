"""Training step on processes: time divided by that of torch's own parallelism, eager and compiled.

The Llama of `static_speed` in its two sizes: the batch sharded (DistributedDataParallel), parameters sharded and
gathered at use (`fully_shard`), weights sharded (`parallelize_module` with DTensor). All contenders of a case run in
the same processes, start with the same weights, use the AdamW of torch with the same options and return the loss of
each step as a number. They take turns. Each case is measured twice: our collectives use shared memory, or Gloo as
torch's.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import meshwright as mw
from benchmarks import static_speed as speed
from benchmarks._transports import GLOO, TRANSPORTS, environment
from benchmarks.rivals import dtensor_model
from benchmarks.static_speed import ADAMW, CHECKED_STEPS, SIZES, Eager, Stage, Start, Step
from meshwright.comm import launch

GOAL = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """A size, a kind of parallelism, the number of ranks, and whether our collectives use Gloo too."""

    size: str
    kind: str
    ranks: int
    gloo: bool = False

    @property
    def mesh(self) -> speed.Case:
        dp, tp = (1, self.ranks) if self.kind == "tp" else (self.ranks, 1)
        return speed.Case(self.size, dp, tp)

    def __str__(self) -> str:
        return f"{self.size} {self.kind} {self.ranks}" + (f" over {GLOO}" if self.gloo else "")


CASES = [Case(size, kind, 2) for size in SIZES for kind in ("dp", "ZeRO-3", "tp")] + [Case("compute", "ZeRO-3", 4)]


# --- the contenders ----------------------------------------------------------------------------------------------


def ours(kind: str, static: bool) -> Callable[[Stage], Step]:
    """Return our step: the model with its marks, and sharded by a stage of ZeRO if the kind requires it."""

    def build(stage: Stage) -> Step:
        sharding = {"sharding": {"enable": True, "stage": 3}} if kind == "ZeRO-3" else {}
        if static:
            return speed.static_step({**speed.COMPILED, **sharding})(stage)
        return speed.our_step(stage, zero_3 if sharding else lambda model, _, __, optimizer: Eager(model, optimizer))

    return build


def zero_3(model: nn.Module, loader: object, loss: object, optimizer: torch.optim.Optimizer) -> Eager:
    del loader, loss
    mw.shard_optimizer(optimizer, mw.ShardingStage3("dp", model))
    return Eager(model, optimizer)


def torchs(kind: str, compiled: bool) -> Callable[[Stage], Step]:
    """Return the step of torch's own implementation of a kind of parallelism."""
    if kind == "tp" and compiled:
        return speed.dtensor_step

    def build(stage: Stage) -> Step:
        model = PARALLEL[kind](stage)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        if compiled:
            model.compile(dynamic=False)
        group = stage.torch_mesh["dp"].get_group()

        def step(*batch: Tensor) -> float:
            loss = model(*stage.own(batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            torch.distributed.all_reduce(total, group=group)
            return total.item() / stage.case.dp

        return step

    return build


def copies(stage: Stage) -> nn.Module:
    return DistributedDataParallel(model_of(stage), device_mesh=stage.torch_mesh["dp"])


def shards(stage: Stage) -> nn.Module:
    model: Any = model_of(stage)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=stage.torch_mesh["dp"])
    return model


def cuts(stage: Stage) -> nn.Module:
    model: Any = model_of(stage)
    return parallelize_module(model, stage.torch_mesh["tp"], dtensor_model.plan(len(model.blocks)))


def model_of(stage: Stage) -> nn.Module:
    return dtensor_model.Model(stage.whole(), speed.rope(stage))


PARALLEL: dict[str, Callable[[Stage], nn.Module]] = {"dp": copies, "ZeRO-3": shards, "tp": cuts}
PAIRS = (("eager", "torch"), ("static", "torch, compiled"))
"""Pairs of contenders: the first one's time is divided by the second one's."""


def contenders(kind: str) -> dict[str, Callable[[Stage], Step]]:
    return {
        "eager": ours(kind, False),
        "torch": torchs(kind, False),
        "static": ours(kind, True),
        "torch, compiled": torchs(kind, True),
    }


# --- one of the processes, and the figure ------------------------------------------------------------------------


def main(path: str, size: str, kind: str, ranks: str, turns: str, caches: str) -> None:
    """Run one rank: every contender's first steps, then all in turns; rank 0 writes the results."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{caches}/nobody"
    stage = speed.set_up(Case(size, kind, int(ranks)).mesh)
    starts = {name: speed.start(stage, build, f"{caches}/{name}") for name, build in contenders(kind).items()}
    steps = {name: found.step for name, found in starts.items() if found.step is not None}
    times = speed.slowest_rank(speed.in_turns(steps, stage, int(turns)))
    counts = speed.calls_of(steps, stage) if speed.GLOO_ONLY else {}
    if stage.torch_mesh.get_rank() == 0:
        Path(path).write_text(json.dumps(row(starts, times, speed.one_device(stage)) | counts))
    torch.distributed.barrier()


def row(starts: dict[str, Start], times: dict[str, list[float]], losses: Sequence[float]) -> dict[str, Any]:
    """Return the results of one case."""
    assert len(losses) == CHECKED_STEPS
    return {
        "ms": {name: speed.spread(found) for name, found in times.items()},
        "ratios": {f"{a} / {b}": speed.ratio(times[a], times[b]) for a, b in PAIRS if a in times and b in times},
        "loss_difference": {name: speed.difference(starts[name].losses, list(losses)) for name in times},
        "failed": {name: found.error for name, found in starts.items() if found.error},
    }


def measure(case: Case, turns: int, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the row of one case, from processes of its own."""
    print(f"{case} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "row.json"
        argv = ["-m", "benchmarks.versus_torch", path, case.size, case.kind, case.ranks, turns, directory]
        env = {"PYTHONPATH": speed.python_path(), **environment(case.gloo), **(env or {})}
        status = launch([str(word) for word in argv], case.ranks, env, timeout=1200)
        if status or not path.exists():
            return {"failed": {"all": f"the processes ended with status {status}"}}
        return json.loads(path.read_text())


def run(quick: bool = False, cases: Sequence[Case] = CASES) -> dict[str, Any]:
    """Return the figure: the worst ratios of our time to torch's, both eager or both compiled."""
    rows = {
        name: {str(each): measure(each, speed.turns(SIZES[each.size], quick)) for each in over(name, cases)}
        for name in TRANSPORTS
    }
    found = {name: worst(rows[name]) for name in TRANSPORTS}
    measured = [row for each in rows.values() for row in each.values()]
    return {
        "name": "versus_torch",
        "value": found,
        "goal": f"ours / torch at most {GOAL}, eager beside eager and static beside compiled, in every case",
        "ok": speed.reached(found, GOAL) and all(map(is_right, measured)),
        "rival": {"DDP, fully_shard, DTensor": 1.0},
        "details": {
            "unit": "ms per step, one thread a process; rivals over Gloo",
            "cases": {name: row for each in rows.values() for name, row in each.items()},
        },
    }


def over(transport: str, cases: Sequence[Case]) -> list[Case]:
    """Return the cases over a transport."""
    return [replace(case, gloo=transport == GLOO) for case in cases]


def worst(rows: dict[str, dict[str, Any]]) -> float | None:
    """Return the largest ratio of all cases; None if there is none."""
    return max((ratio for row in rows.values() for ratio in row.get("ratios", {}).values()), default=None)


def is_right(row: dict[str, Any]) -> bool:
    """True if no contender failed but torch's compiled one, and all losses are those of one device."""
    same = all(value <= speed.LOSS_GOAL for value in row.get("loss_difference", {}).values())
    return same and not any(name in row["failed"] for name in ("all", "eager", "static", "torch"))


if __name__ == "__main__":
    main(*sys.argv[1:])
