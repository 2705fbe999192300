"""Pipelines: backward pass of a chunk in two parts, B and W, beside torch's two autograd calls.

A chunk in the middle of three stages, of 8 to 64 blocks (linear, tanh, linear; fewer would fit into the first caches),
on one rank, for which nothing is sent.
Counted: bytes in memory between B and W compared with the bytes that the products of W read, and how often each block
is computed again under recompute. Timed, in turns: W and B of ours and of `torch.distributed.pipelining`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import PeerlessCommunicator, current_communicator, using_communicator
from meshwright.engine.recording.program_inputs import apply_captured_layouts, fetch_of
from meshwright.graph import alias_classes, capture, complete, copy_batch_inputs, record_gradients, runner, with_layouts
from meshwright.passes import Recompute
from meshwright.pipeline import RankParts, split_stages, split_step
from meshwright.pipeline.partition.step_parts import PartPlace

LENGTHS, WIDTH, ROWS, RANKS, MIDDLE = (8, 16, 32, 64), 64, 32, 3, 1
LINEAR_GOAL = 1.25
"""Maximum time of W for 64 blocks, relative to 8 times that for 8 blocks."""


class Chunks(nn.Module):
    """A layer, blocks, a layer: each on a stage of its own."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(length))
        self.homes = [mw.ProcessMesh([rank], ["dp"]) for rank in range(RANKS)]

    def forward(self, x: Tensor) -> Tensor:
        x = mw.reshard(self.first(mw.reshard(x, self.homes[0], [mw.Replicate()])), self.homes[1], [mw.Replicate()])
        for each in self.blocks:
            x = each(x)
        return self.last(mw.reshard(x, self.homes[2], [mw.Replicate()])).square().mean()


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Middle:
    """The parts of the chunk in the middle, with values to run them on."""

    def __init__(self, length: int, recompute: bool = False) -> None:
        torch.manual_seed(0)
        model = Chunks(length)
        captured = capture(model, model, (torch.randn(ROWS, WIDTH),))
        program = copy_batch_inputs(captured.program)
        program, stages = split_stages(with_layouts(program, complete(program, {})))
        step = record_gradients(replace(captured, program=program), current_communicator().rank, RANKS)
        apply_captured_layouts(replace(captured, program=program), None)
        self.step = Recompute(policy=("blocks.*",))(step) if recompute else step
        self.parts: RankParts = split_step(self.step, stages)
        self.known: dict[Any, Any] = {}
        for given in self.step.inputs:
            x: Any = fetch_of(given, captured.slots)([torch.randn(ROWS, WIDTH)])
            self.known[given.value] = x.to_local().detach() if isinstance(x, mw.DistTensor) else x
        for crossing in self.parts.crossings:
            self.known[crossing.result] = torch.randn(ROWS, WIDTH)
        for place in self.parts.programs:
            if place.part in ("always", "F", "B", "W"):
                self.run(place)

    def run(self, place: PartPlace) -> Callable[[], Any]:
        """Return the part as a function; its results are known from now on."""
        program = self.parts.programs[place]
        run, args = runner(program), [self.known[i.value] for i in program.inputs]
        out, _ = run(*args)
        self.known.update(zip(program.outputs, out, strict=True))
        return lambda: run(*args)

    def of(self, part: Any) -> Callable[[], Any]:
        return self.run(PartPlace(part, MIDDLE))

    def held(self) -> tuple[int, int]:
        """Return the bytes of computed values that W reads, and the bytes of the operands of its products."""
        program = self.parts.programs[PartPlace("W", MIDDLE)]
        found = alias_classes(self.step)
        size = {found.of(v): v.nbytes for v in (*self.step.producers, *(i.value for i in self.step.inputs))}
        given = {found.of(i.value) for i in program.inputs if i.role == "saved"}
        needed = {found.of(v) for n in program.nodes if "mm" in str(n.op) for v in n.ins}
        return sum(size[root] for root in given), sum(size[root] for root in needed)

    def recomputed(self) -> float:
        """Return how often a tanh of the forward pass is computed again."""
        phases = [n.origin.phase for n in self.step.nodes if str(n.op) == "aten.tanh.default"]
        return phases.count("backward") / phases.count("forward")


class Torchs:
    """The same chunk in torch.distributed.pipelining: two calls of autograd."""

    def __init__(self, length: int) -> None:
        from torch.distributed.pipelining import _backward as backward

        torch.manual_seed(0)
        self.chunk = nn.Sequential(*(block() for _ in range(length)))
        self.backward: Any = backward
        self.x, self.grad = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)

    def times(self) -> tuple[float, float]:
        """Return seconds of B and of W."""
        out = self.chunk(self.x)
        begin = time.perf_counter()
        _, groups = self.backward.stage_backward_input([out], [self.grad], [self.x], self.chunk.parameters())
        middle = time.perf_counter()
        self.backward.stage_backward_weight(self.chunk.parameters(), groups)
        end = time.perf_counter()
        self.chunk.zero_grad()
        return middle - begin, end - middle


def timed(length: int, turns: int) -> dict[str, float]:
    """Return milliseconds of both, measured in turns."""
    ours, theirs = Middle(length), Torchs(length)
    b, w = ours.of("B"), ours.of("W")
    found: dict[str, list[float]] = {name: [] for name in ("B", "W", "torch B", "torch W")}
    for _ in range(turns):
        for name, part in (("B", b), ("W", w)):
            begin = time.perf_counter()
            part()
            found[name].append(time.perf_counter() - begin)
        for name, seconds in zip(("torch B", "torch W"), theirs.times(), strict=True):
            found[name].append(seconds)
    return {name: round(statistics.median(seconds) * 1e3, 3) for name, seconds in found.items()}


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the time of W for 64 blocks over 8 times that for 8."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with using_communicator(PeerlessCommunicator(MIDDLE, RANKS)):
        rows = {length: timed(length, 5 if quick else 100) for length in LENGTHS}
        held = {length: Middle(length).held() for length in LENGTHS}
        again = Middle(8, recompute=True).recomputed()
    torch.set_num_threads(threads)
    few, many = LENGTHS[0], LENGTHS[-1]
    growth = {name: round(rows[many][name] / rows[few][name] * few / many, 3) for name in ("W", "torch W")}
    fits = all(has <= needs for has, needs in held.values())
    return {
        "name": "split_backward",
        "value": growth["W"],
        "goal": f"W of {many} blocks over {many // few} W of {few} at most {LINEAR_GOAL}; between B and W no more than "
        "W's products read; each block computed again once",
        "ok": growth["W"] <= LINEAR_GOAL and fits and again == 1.0,
        "rival": {"torch.distributed.pipelining": growth["torch W"]},
        "details": {
            "ms": rows,
            "bytes held between B and W, and read by products": held,
            "forwards of a recomputed block in the backward pass": again,
        },
    }
