"""Pipelines: gradients under every schedule against one device; random valid and broken tables.

Every known schedule that keeps the optimizer's meaning, for p in {2, 4} stages, m in {p, 2p} microbatches and v in
{1, 2} chunks, on simulated ranks and on processes (Gloo). The model has a skip connection over
all stages, a mask, and an embedding tied to its last layer. Valid tables come from a random walk; damage to valid
tables gives broken ones.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import current_communicator, init_process, launch
from meshwright.engine.recording.program_inputs import apply_captured_layouts, fetch_of
from meshwright.graph import capture, complete, copy_batch_inputs, record_gradients, with_layouts
from meshwright.pipeline import (
    KNOWN_SCHEDULES,
    Action,
    ActionKind,
    PipelineRun,
    Schedule,
    ScheduleError,
    check_schedule,
    joint_epilogue,
    linear,
    looped,
    mirrored,
    peaks,
    split_batch,
    split_stages,
    split_step,
    with_epilogue,
    zigzag,
)
from meshwright.tensor import local_parts

GOAL, FUZZ, BROKEN = 1e-5, 1000, 1000
WIDTH, WORDS, ROWS = 8, 13, 2
ROOT = Path(__file__).parents[1]
Way = tuple[int, ...]
LENGTH = 4
OTHER_MEANING = ("PipeDream", "PipeDream-2BW")


class Chain(nn.Module):
    """Blocks of an encoder, one per chunk; the input of the first block is added again before the last layer."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.entry = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(chunks))
        self.exit = nn.Linear(WIDTH, WORDS, bias=False)
        self.exit.weight = self.entry.weight
        self.homes: Sequence[Any] = ()

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = first = self.entry(tokens)
        for n, block in enumerate(self.blocks):
            x = self.to(n, x)
            x = x + block(x) * self.to(n, mask, split=False).unsqueeze(-1)
        last = len(self.blocks) - 1
        return (x + self.to(last, first, split=False)) @ self.to(last, self.exit.weight, split=False).t()

    def to(self, n: int, x: Tensor, split: bool = True) -> Tensor:
        if not self.homes:
            return x
        y = mw.reshard(x, self.homes[n], [mw.Replicate()])
        return mw.pipe_split(y) if split and n and self.homes[n] is self.homes[n - 1] else y

    def loss(self, tokens: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        out = self(tokens, mask)
        labels = self.to(len(self.blocks) - 1, labels, split=False)
        return nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())


def batch(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    tokens, labels = (torch.randint(0, WORDS, (rows, LENGTH), generator=g) for _ in range(2))
    return tokens, torch.rand((rows, LENGTH), generator=g) > 0.3, labels


def laid(chunks: int, homes: Sequence[Any]) -> Chain:
    torch.manual_seed(1)
    model = Chain(chunks)
    if homes:
        model.homes = homes
        mw.shard_layer(model.entry, homes[0])
        model.exit.weight = model.entry.weight
    return model


class Work:
    """One placement on one rank: the parts of its step, which every table runs; and gradients of one device."""

    def __init__(self, way: Way) -> None:
        self.way, self.rank, size = way, current_communicator().rank, max(way) + 1
        homes = [mw.ProcessMesh([stage], ["dp"]) for stage in range(size)]
        model = laid(len(way), [homes[stage] for stage in way])
        captured = capture(model, model.loss, batch(ROWS))
        program = copy_batch_inputs(captured.program)
        program = with_layouts(program, complete(program, {}))
        captured = replace(captured, program=program)
        found = [split_stages(program)]
        if len(way) == size:
            found.append(split_stages(mirrored(program, found[0][1])))
        self.ways = [
            split_step(record_gradients(replace(captured, program=p), self.rank, size), stages) for p, stages in found
        ]
        apply_captured_layouts(captured, None)
        self.slots = captured.slots
        self.expected: dict[int, dict[str, Tensor]] = {}

    def error(self, schedule: Schedule) -> tuple[float, float]:
        """Return the largest relative difference of a gradient of this rank's parameters, and the held chunks."""
        ways, m = self.ways[: len(schedule.ways)], schedule.microbatches
        ways = with_epilogue(ways, joint_epilogue(ways, m))
        peak = Peak(ways)
        run = PipelineRun(ways, schedule, self.rank, split_batch(ways, schedule, {0, 1, 2}), watch=peak)
        leaves = list(batch(ROWS * m))
        with local_parts():
            outputs, _ = run(*(fetch_of(i, self.slots)(leaves) for i in run.inputs))
        expected = self.one_device(m)
        own = [i.name for i in ways[0].inputs if i.role == "parameter" and i.spec and self.rank in i.spec.mesh]
        errors = [_relative(outputs["grads"][name], expected[name]) for name in own]
        return max([*errors, _relative(outputs["out"], expected[""])]), peak.most

    def one_device(self, m: int) -> dict[str, Tensor]:
        if m not in self.expected:
            model = laid(len(self.way), ())
            loss = model.loss(*batch(ROWS * m))
            loss.backward()
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            self.expected[m] = {"": loss.detach(), **grads}
        return self.expected[m]


class Peak:
    """A counter of the microbatch chunks with values in memory that a forward made for a backward."""

    def __init__(self, ways: Sequence[Any]) -> None:
        self.most = 0
        self.made: list[set[Any]] = []
        for parts in ways:
            read = {i.value for place, p in parts.programs.items() if place.part in ("B", "W") for i in p.inputs}
            for place, p in parts.programs.items():
                if place.part == "F":
                    arrived = {c.result for c in parts.crossings if c.target == place}
                    self.made.append((arrived | {*p.outputs}) & read)

    def __call__(self, held: Sequence[dict[Any, Any]]) -> None:
        now = sum(1 for known in held for made in self.made if made & known.keys())
        self.most = max(self.most, now)


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


# --- tables ------------------------------------------------------------------------------------------------------


def known_tables(p: int) -> Iterator[Schedule]:
    """Yield every known schedule that runs one device's step."""
    for name, k in KNOWN_SCHEDULES.items():
        if name in OTHER_MEANING:
            continue
        for m in (p, 2 * p):
            for v in (1, 2) if k.takes_chunks else (1,):
                try:
                    yield k.build(p, m, v)
                except ScheduleError:
                    continue  # DualPipe and Chimera need more microbatches


def random_table(way: Way, rng: random.Random) -> Schedule:
    """Return a schedule from a random walk: each rank runs any action whose inputs exist by then."""
    m, chunks = rng.randint(1, 4), len(way)
    done: set[tuple[ActionKind, int, int]] = set()
    rows: list[list[Action]] = [[] for _ in range(max(way) + 1)]
    f, b, w = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT

    def can(kind: ActionKind, n: int, c: int) -> bool:
        if (kind, n, c) in done:
            return False
        if kind is f:
            return c == 0 or (f, n, c - 1) in done
        if kind is b:
            return (f, n, c) in done and (c == chunks - 1 or (b, n, c + 1) in done)
        return (b, n, c) in done

    while len(done) < 3 * m * chunks:
        ready = [(k, n, c) for k in (f, b, w) for n in range(m) for c in range(chunks) if can(k, n, c)]
        kind, n, c = rng.choice(ready)
        done.add((kind, n, c))
        rows[way[c]].append(Action(kind, n, c))
    return Schedule("random", (way,), m, tuple(map(tuple, rows)))


def broken_table(schedule: Schedule, rng: random.Random) -> Schedule:
    """Return a table with an action that is missing, doubled, on another rank, of no microbatch, or too early."""
    rows = [list(row) for row in schedule.rows]
    rank = rng.choice([r for r, row in enumerate(rows) if row])
    place = rng.randrange(len(rows[rank]))
    action = rows[rank][place]
    match rng.randrange(5):
        case 0:
            del rows[rank][place]
        case 1:
            rows[rank].insert(rng.randrange(len(rows[rank])), action)
        case 2:
            rows[(rank + 1) % len(rows)].append(rows[rank].pop(place))
        case 3:
            rows[rank][place] = action._replace(microbatch=action.microbatch + schedule.microbatches)
        case _:
            late = next(n for n, a in enumerate(rows[rank]) if a.kind is ActionKind.BACKWARD_INPUT)
            first = rows[rank].pop(late)
            ahead = next(n for n, a in enumerate(rows[rank]) if a[:3] == (ActionKind.FORWARD, *first[1:3]))
            rows[rank].insert(ahead, first)
    return replace(schedule, rows=tuple(map(tuple, rows)))


def refused(schedule: Schedule) -> bool:
    try:
        check_schedule(schedule)
    except ScheduleError:
        return True
    return False


def ways_of(p: int) -> tuple[Way, ...]:
    return linear(p)[0], looped(p, 2)[0], zigzag(p, 2)[0]


# --- the runs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """The task of one world of p ranks: every known table, and a number of random ones."""

    p: int
    known: bool
    fuzz: int

    def run(self) -> list[dict[str, Any]]:
        """Return a row per table, the same list on every rank: name, error, held chunks and expected ones."""
        works: dict[Way, Work] = {}
        rows: list[dict[str, Any]] = []
        for table in self.tables():
            way = table.ways[0]
            if way not in works:
                works[way] = Work(way)
            error, held = works[way].error(table)
            rows.append(
                {
                    "name": table.name,
                    "m": table.microbatches,
                    "v": len(way) // self.p,
                    "error": error,
                    "held": held,
                    "predicted": peaks(table)[current_communicator().rank],
                }
            )
        return rows

    def tables(self) -> Iterator[Schedule]:
        if self.known:
            yield from known_tables(self.p)
        rng = random.Random(self.p)
        for _ in range(self.fuzz):
            yield random_table(rng.choice(ways_of(self.p)), rng)


def main(path: str, p: str, known: str, fuzz: str) -> None:
    """Run one rank of real processes, and write its rows."""
    torch.set_num_threads(1)
    init_process(backend="gloo")
    rows = Task(int(p), known == "1", int(fuzz)).run()
    Path(f"{path}.{current_communicator().rank}").write_text(json.dumps(rows))


def on_processes(task: Task) -> list[list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        argv = ["-m", "benchmarks.pipeline_gradients", str(path), str(task.p), str(int(task.known)), str(task.fuzz)]
        env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
        status = launch(argv, task.p, env, timeout=1200)
        if status:
            raise RuntimeError(f"the processes ended with status {status}")
        return [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(task.p)]


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the largest relative difference of any gradient under any table."""
    fuzz = (20 if quick else FUZZ) // 2
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for p in (2, 4):
        print(f"p = {p} ...", file=sys.stderr, flush=True)
        found[f"simulated, p = {p}"] = mw.simulate(Task(p, True, 0).run, p)
        found[f"processes, p = {p}"] = on_processes(Task(p, True, fuzz))
    rng = random.Random(1)
    tables = (broken_table(random_table(rng.choice(ways_of(rng.choice((2, 4)))), rng), rng) for _ in range(BROKEN))
    accepted = sum(not refused(table) for table in tables)
    rows = [row for ranks in found.values() for rank in ranks for row in rank]
    error, other = max(row["error"] for row in rows), [row for row in rows if row["held"] != row["predicted"]]
    return {
        "name": "pipeline_gradients",
        "value": float(f"{error:.1e}"),
        "goal": f"at most {GOAL:g} relative, held = predicted, no broken table accepted",
        "ok": error <= GOAL and not other and not accepted,
        "rival": None,
        "details": {
            "tables": {where: len(ranks[0]) for where, ranks in found.items()},
            "known": sorted({row["name"] for row in rows} - {"random"}),
            "random tables on processes": 2 * fuzz,
            "held otherwise than predicted": other[:10],
            "broken tables accepted": f"{accepted} of {BROKEN}",
        },
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
