"""Static training step on processes: time divided by that of a program written by hand and compiled.

A Llama-style model in two sizes, one dominated by computation and one by everything else, on 2 and 4 processes with one
thread each. All contenders run in the same processes, keep the same layout, start with the same weights and return the
loss of each step as a number. They take turns, in blocks of a few steps. A ratio is the median, over the turns, of the
ratio of two blocks of one turn. Each case is measured twice: our collectives use shared memory, or Gloo as the rivals.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks._transports import GLOO, TRANSPORTS, environment, gloo_calls
from meshwright.comm import launch
from meshwright.models import LlamaConfig

BY_HAND_GOAL, DTENSOR_GOAL, LOSS_GOAL = 1.0, 0.9, 1e-4
ADAMW: dict[str, Any] = {"lr": 5e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CHECKED_STEPS = 6
ROOT = Path(__file__).parents[1]

Batch = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor], float]
"""Tokens and targets [b, s] -> the mean loss of the whole batch."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model, its batch, and the steps of a turn."""

    model: LlamaConfig
    batch: int
    sequence: int
    steps: int
    turns: int
    quick_turns: int


@dataclass(frozen=True, slots=True)
class Case:
    """One size on one mesh, with its name in the table and on a command line."""

    size: str
    dp: int
    tp: int
    passes: bool = False
    """True to measure the static mode with passes left out and added, one by one."""
    gloo: bool = False
    """Without shared memory: our collectives use Gloo too."""
    nodes: bool = False
    """The batch over two mesh axes, nodes and the ranks of each: dp ranks in two nodes, replicated weights."""

    @property
    def ranks(self) -> int:
        return self.dp * self.tp

    def __str__(self) -> str:
        over = f" over {GLOO}" if self.gloo else ""
        beside = ", passes" if self.passes else " in two nodes" if self.nodes else ""
        return f"{self.size} dp={self.dp} tp={self.tp}{over}{beside}"


SIZES = {
    "overhead": Size(LlamaConfig(256, 64, 2, 4, 2, 176), batch=4, sequence=32, steps=10, turns=40, quick_turns=15),
    "compute": Size(LlamaConfig(2048, 512, 4, 8, 4, 1376), batch=8, sequence=128, steps=1, turns=25, quick_turns=5),
}
SMALLEST = Size(LlamaConfig(32, 16, 1, 4, 2, 24), batch=4, sequence=8, steps=1, turns=2, quick_turns=2)
"""The size for a comparison of losses only."""
CASES = [Case(size, dp, tp) for size in SIZES for dp, tp in ((1, 2), (2, 1), (2, 2))]
BESIDE = [
    *(Case(size, dp, tp, passes=True) for size, dp, tp in (("overhead", 1, 2), ("overhead", 2, 1), ("compute", 2, 1))),
    Case("compute", 4, 1, nodes=True),
]
"""Cases that the goal does not cover: passes one by one, and a mesh with nodes."""

PLAIN: dict[str, Any] = {"compiler": "none"}
MERGED: dict[str, Any] = {"enable": True, "k_steps": 2}
STRATEGIES: dict[str, dict[str, Any]] = {
    "node by node": {},
    "with inductor": {"compiler": "inductor"},
    "without buckets": {"dp_optimization": {"enable": False}},
    "without sharing": {"mp_optimization": {"enable": False}},
    "without foreach": {"foreach": False},
    "without in-place writes": {"inplace": False},
    "with release": {"release": True},
    "with fused passes": {"fused_passes": {"enable": True}},
    "with recompute": {"recompute": {"enable": True, "layers": ["blocks.*"]}},
    "with sequence parallelism": {"sp_optimization": {"enable": True}},
    "with sharding 1": {"sharding": {"enable": True, "stage": 1}},
    "with sharding 2": {"sharding": {"enable": True, "stage": 2}},
    "with sharding 3": {"sharding": {"enable": True, "stage": 3}},
    "with sharding 3 and schedule": {"sharding": {"enable": True, "stage": 3}, "passes": [{"name": "schedule"}]},
    "with gradient merge": {"gradient_merge": MERGED},
    "with gradient merge, sums apart": {"gradient_merge": {**MERGED, "fused": False}},
    "with schedule": {"passes": [{"name": "schedule"}]},
    "with split products and schedule": {"passes": [{"name": "split_products"}, {"name": "schedule"}]},
    "with bfloat16": {"amp": {"enable": True}},
}
"""Settings of the static mode by name: every pass left out, or added if nodes run one by one."""
OVER_NODES = {"with sums over nodes": {"passes": [{"name": "hierarchy", "inner": ["tp"], "outer": ["dp"]}]}}
"""Settings for a mesh with nodes: the axis dp is that of the nodes, and tp that of the ranks in a node."""


# --- the contenders ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stage:
    """The input of every contender: the case, its size, both libraries' meshes and the batches."""

    case: Case
    size: Size
    mesh: Any
    torch_mesh: Any
    batches: Sequence[Batch]

    def whole(self) -> Any:
        """Return a new model, with the same weights each time."""
        from meshwright.models import Llama

        return Llama(self.size.model)

    def own(self, batch: Batch) -> Batch:
        """Return this rank's part of a batch."""
        tokens, targets = (x.chunk(self.case.dp)[self.torch_mesh["dp"].get_local_rank()] for x in batch)
        return tokens, targets


def ours(
    model: nn.Module, loader: Iterable[Batch], loss: Any, optimizer: torch.optim.Optimizer, strategy: dict[str, Any]
) -> mw.DistModel:
    """Return the model in static mode."""
    return mw.to_static(model, loader, loss, optimizer, mw.Strategy.of(**strategy))


class Eager:
    """Eager mode with the interface of a `DistModel`: one step per call."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def train(self) -> None:
        self.model.train()

    def __call__(self, *batch: Tensor) -> Tensor:
        loss = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def our_step(stage: Stage, make: Callable[..., Any]) -> Step:
    from meshwright.models import mark

    model = stage.whole()
    (cut_batch if stage.case.nodes else mark)(model, stage.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    dist_model = make(model, stage.batches, None, optimizer)
    dist_model.train()
    return lambda *batch: dist_model(*batch).item()


def cut_batch(model: Any, mesh: mw.ProcessMesh) -> None:
    """Replicate the weights, and shard the batch over both axes of the mesh."""
    both = [mw.Replicate(), mw.Shard(0), mw.Shard(0)]
    mw.shard_layer(model, mesh, input_fn=lambda inputs, mesh: tuple(mw.reshard(x, mesh, both) for x in inputs))


def static_step(settings: dict[str, Any]) -> Callable[[Stage], Step]:
    return lambda stage: our_step(stage, lambda *parts: ours(*parts, settings))


def eager_step(stage: Stage) -> Step:
    return our_step(stage, lambda model, loader, loss, optimizer: Eager(model, optimizer))


def by_hand_step(stage: Stage) -> Step:
    from benchmarks.rivals import by_hand

    step = by_hand.training_step(stage.whole(), stage.size.model, rope(stage), by_hand.AdamW(**ADAMW), stage.torch_mesh)
    return lambda *batch: step(*stage.own(batch))


def dtensor_step(stage: Stage) -> Step:
    from benchmarks.rivals import by_hand, dtensor_model

    step = dtensor_model.training_step(stage.whole(), rope(stage), by_hand.AdamW(**ADAMW), stage.torch_mesh)
    return lambda *batch: step(*stage.own(batch))


def rope(stage: Stage) -> tuple[Tensor, Tensor]:
    from meshwright.models._llama import rope_table

    return rope_table(stage.size.sequence, stage.size.model.head_size, torch.device("cpu"), torch.float32)


RIVALS: dict[str, Callable[[Stage], Step]] = {"eager": eager_step, "by hand": by_hand_step, "DTensor": dtensor_step}
GLOO_ONLY = os.environ.get("MESHWRIGHT_SHARED_MEMORY") == "off"
"""True if this process uses no shared memory, so that the trace of torch shows all collectives."""
UNCOMPILED = os.environ.get("STATIC_SPEED_UNCOMPILED") == "1"
"""True if no contender is compiled, to compare losses only."""
COMPILED: dict[str, Any] = PLAIN if UNCOMPILED else {"compiler": "inductor"}
CONTENDERS = {"ours": static_step(COMPILED), **RIVALS}
PASSES = {name: static_step({**PLAIN, **settings}) for name, settings in STRATEGIES.items()}
NODES = {name: static_step({**PLAIN, **settings}) for name, settings in ({"node by node": {}} | OVER_NODES).items()}


# --- one of the processes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """A contender after its first steps: its step function, or the reason why it fails."""

    step: Step | None
    losses: list[float]
    seconds: float
    error: str = ""


def main(path: str, size: str, dp: str, tp: str, passes: str, nodes: str, turns: str, caches: str) -> None:
    """Run one rank: every contender's first steps, then all in turns; rank 0 writes the results."""
    case = Case(size, int(dp), int(tp), passes == "1", nodes=nodes == "1")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{caches}/nobody"
    stage = set_up(case)
    contenders = PASSES if case.passes else NODES if case.nodes else CONTENDERS
    starts = {name: start(stage, build, f"{caches}/{name}") for name, build in contenders.items()}
    steps = {name: found.step for name, found in starts.items() if found.step is not None}
    times = slowest_rank(in_turns(steps, stage, int(turns)))
    counts = calls_of(steps, stage) if GLOO_ONLY else {}
    if stage.torch_mesh.get_rank() == 0:
        Path(path).write_text(json.dumps(row(starts, times, one_device(stage)) | counts))
    torch.distributed.barrier()


def calls_of(steps: dict[str, Step], stage: Stage) -> dict[str, Any]:
    """Return the entry of a row with each contender's collectives of one step; some steps also compare replicas."""

    def fewest(step: Step) -> dict[str, int]:
        counts = [gloo_calls(lambda n=number: step(*batch_of(stage, n))) for number in range(3)]
        return min(counts, key=lambda count: count["calls"])

    return {"gloo": {name: fewest(step) for name, step in steps.items()}}


def set_up(case: Case) -> Stage:
    """Set up both libraries on the processes of one run; load torch.compile, so that no contender pays for that."""
    import meshwright as mw

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    mw.init_process(backend="gloo")
    if UNCOMPILED:
        torch._dynamo.config.disable = True
    else:
        torch.compile(lambda x: x + 1)(torch.ones(1))
    size = SMALLEST if case.size == "smallest" else SIZES[case.size]
    shape = (1, 2, case.ranks // 2) if case.nodes else (1, case.dp, case.tp)
    mesh = mw.ProcessMesh(torch.arange(case.ranks).reshape(shape).numpy(), dim_names=["pp", "dp", "tp"])
    torch_mesh = torch.distributed.init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(1)
    shape = (2, size.batch, size.sequence)
    batches = [torch.randint(size.model.vocab, shape, generator=generator).unbind() for _ in range(4)]
    return Stage(case, size, mesh, torch_mesh, batches)


def start(stage: Stage, build: Callable[[Stage], Step], cache: str) -> Start:
    """Run a contender's first steps, compiled without the caches of others; all ranks agree on failure."""
    if not UNCOMPILED:
        from torch._inductor.utils import clear_caches

        clear_caches()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.replace(" ", "_")  # Inductor cannot compile below a path with a space
    step, losses, error, seconds = None, [], "", 0.0
    torch.distributed.barrier()
    begin = time.perf_counter()
    try:
        step = build(stage)
        for number in range(CHECKED_STEPS):
            losses.append(step(*batch_of(stage, number)))
            seconds = seconds or time.perf_counter() - begin
    except Exception as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {str(raised)[:300]}"
    failed = torch.tensor(bool(error), dtype=torch.int32)
    torch.distributed.all_reduce(failed)
    return Start(None if failed else step, losses, seconds, error or ("another rank failed" if failed else ""))


def batch_of(stage: Stage, number: int) -> Batch:
    return stage.batches[number % len(stage.batches)]


def one_device(stage: Stage) -> list[float]:
    """Return the losses of the same steps in plain torch."""
    model = stage.whole()
    plain = Eager(model, torch.optim.AdamW(model.parameters(), **ADAMW))
    return [plain(*batch_of(stage, number)).item() for number in range(CHECKED_STEPS)]


def in_turns(steps: dict[str, Step], stage: Stage, turns: int) -> dict[str, list[float]]:
    """Return milliseconds per step of each contender in each turn; each turn begins with another one."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    gc.disable()
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            gc.collect(0)
            torch.distributed.barrier()
            begin = time.perf_counter()
            for number in range(stage.size.steps):
                steps[name](*batch_of(stage, number))
            times[name].append((time.perf_counter() - begin) / stage.size.steps * 1e3)
    gc.enable()
    return times


def slowest_rank(times: dict[str, list[float]]) -> dict[str, list[float]]:
    table = torch.tensor(list(times.values()), dtype=torch.float64)
    torch.distributed.all_reduce(table, torch.distributed.ReduceOp.MAX)
    return dict(zip(times, table.tolist(), strict=True))


# --- the figure --------------------------------------------------------------------------------------------------


def row(starts: dict[str, Start], times: dict[str, list[float]], losses: list[float]) -> dict[str, Any]:
    """Return the results of one case."""
    good = {name: found.losses for name, found in starts.items() if name in times}
    return {
        "ms": {name: spread(found) for name, found in times.items()},
        "first_step_s": {name: round(starts[name].seconds, 1) for name in times},
        "ratios": ratios(times),
        "ratios_of_minima": ratios({name: [min(found)] for name, found in times.items()}),
        "over_node_by_node": compared(times),
        "loss_difference": {name: difference(found, losses) for name, found in good.items()},
        "failed": {name: found.error for name, found in starts.items() if found.error},
    }


def spread(times: list[float]) -> dict[str, float]:
    lower, median, upper = statistics.quantiles(times, n=4)
    return {"min": round(min(times), 2), "q1": round(lower, 2), "median": round(median, 2), "q3": round(upper, 2)}


def ratios(times: dict[str, list[float]]) -> dict[str, float]:
    pairs = [("ours", "by hand"), ("ours", "DTensor"), ("by hand", "DTensor"), ("eager", "by hand")]
    return {f"{a} / {b}": ratio(times[a], times[b]) for a, b in pairs if a in times and b in times}


def compared(times: dict[str, list[float]]) -> dict[str, float]:
    """Return each strategy's time over that of the first: the gain of a pass left out, or the cost of one put in."""
    first, *others = STRATEGIES | OVER_NODES
    return {name: ratio(times[name], times[first]) for name in others if name in times}


def ratio(a: list[float], b: list[float]) -> float:
    """Return the median over turns of a's time divided by b's."""
    return round(statistics.median(x / y for x, y in zip(a, b, strict=True)), 3)


def difference(losses: list[float], reference: list[float]) -> float:
    """Return the largest relative difference."""
    return float(f"{max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)):.1e}")


def run(quick: bool = False, cases: Sequence[Case] = CASES) -> dict[str, Any]:
    """Return the figure: the worst ratios of our time to that of the program by hand; all cases are in the details.

    The additional cases do not count for the value.
    """
    beside = {str(case): measure(case, turns(SIZES[case.size], True)) for case in (() if quick else BESIDE)}
    rows = {
        name: {str(each): measure(each, turns(SIZES[each.size], quick)) for each in over(name, cases)}
        for name in TRANSPORTS
    }
    by_hand, dtensor = ({name: worst(found, pair) for name, found in rows.items()} for pair in RATIOS)
    measured = [row for found in rows.values() for row in found.values()]
    return {
        "name": "static_speed",
        "value": by_hand,
        "goal": f"ours / by hand at most {BY_HAND_GOAL}, ours / DTensor at most {DTENSOR_GOAL}, in every case",
        "ok": reached(by_hand, BY_HAND_GOAL) and reached(dtensor, DTENSOR_GOAL) and all(map(agree, measured)),
        "rival": {"ours / DTensor": dtensor},
        "details": {
            "unit": "ms per step, one thread a process; rivals over Gloo",
            "cases": {name: row for found in rows.values() for name, row in found.items()} | beside,
        },
    }


def over(transport: str, cases: Sequence[Case]) -> list[Case]:
    """Return the cases over a transport."""
    return [replace(case, gloo=transport == GLOO) for case in cases]


def reached(ratios: dict[str, float | None], goal: float) -> bool:
    """True if there is a ratio for each transport, and none is above the goal."""
    return all(found is not None and found <= goal for found in ratios.values())


def measure(case: Case, turns: int, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the row of one case, from processes of its own."""
    print(f"{case} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "row.json"
        argv = ["-m", "benchmarks.static_speed", path, case.size, case.dp, case.tp]
        argv += [int(case.passes), int(case.nodes), turns, directory]
        env = {"PYTHONPATH": python_path(), **environment(case.gloo), **(env or {})}
        status = launch([str(word) for word in argv], case.ranks, env, timeout=1800)
        if status or not path.exists():
            return {"failed": {"all": f"the processes ended with status {status}"}}
        return json.loads(path.read_text())


def turns(size: Size, quick: bool) -> int:
    return size.quick_turns if quick else size.turns


def python_path() -> str:
    """Return PYTHONPATH with this folder's parent first, so that the processes find the benchmarks from anywhere."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


RATIOS = ("ours / by hand", "ours / DTensor")


def worst(rows: dict[str, dict[str, Any]], pair: str) -> float | None:
    """Return the largest ratio; None if no case has one."""
    found = [row.get("ratios", {}).get(pair) for row in rows.values()]
    return None if None in found else max(found)


def agree(row: dict[str, Any]) -> bool:
    """True if no contender failed and all of them gave the losses of one device."""
    return not row["failed"] and all(value <= LOSS_GOAL for value in row["loss_difference"].values())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(*sys.argv[1:])
    else:
        print(json.dumps(run()))
