"""Memory of a rank under ZeRO and sequence parallelism: error of the formula against real processes.

A chain of feed-forward blocks is trained by AdamW on 4 processes. The memory of a process is its anonymous resident
memory, without mapped files and shared memory. A thread reads it every millisecond, and the memory before the step is
subtracted. Freed memory goes back to the system (MESHWRIGHT_KEEP_MEMORY=off), so that the peak is the required memory.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import launch

GOAL = 0.05
RANKS, STEPS, MIB = 4, 3, 2**20
SEQUENCE_PLAN = {
    "*.norm": mw.SequenceParallelEnable(),
    "*.work": mw.SequenceParallelDisable(),
    "*.work.up": mw.ColwiseParallel(),
    "*.work.down": mw.RowwiseParallel(),
}
TENSOR_PLAN = {name: style for name, style in SEQUENCE_PLAN.items() if name.startswith("*.work.")}
ENVIRONMENT = {"MESHWRIGHT_KEEP_MEMORY": "off", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Chain:
    """Sizes: blocks of [width, 4 width] weights, on this many rows."""

    blocks: int
    width: int
    rows: int

    @property
    def parameters(self) -> int:
        """Return the bytes of all weights."""
        return self.blocks * self.block

    @property
    def block(self) -> int:
        """Return the bytes of the two weights of a block."""
        return 2 * 4 * 4 * self.width**2

    @property
    def stream(self) -> int:
        """Return the bytes of the values between two blocks."""
        return 4 * self.rows * self.width

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[Block(self.width) for _ in range(self.blocks)])


class Work(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """x + work(norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.work = nn.LayerNorm(width, elementwise_affine=False), Work(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.work(self.norm(x))


@dataclass(frozen=True)
class Case:
    """The parallelism of the chain, and the bytes that follow from it."""

    chain: Chain
    axis: str
    config: mw.Parallelism
    formula: Callable[[Chain], float]
    says: str


STATES = Chain(blocks=12, width=1024, rows=8)
"""A chain whose weights dominate."""
ACTIVATIONS = Chain(blocks=24, width=256, rows=8192)
"""A chain whose activations dominate."""

CASES = {
    "dp": Case(STATES, "dp", mw.Parallelism(), lambda c: 4 * c.parameters, "weights, gradients, two states"),
    "ZeRO-1": Case(
        STATES, "dp", mw.Parallelism(zero=1), lambda c: (2 + 2 / RANKS) * c.parameters, "weights, gradients, states / n"
    ),
    "ZeRO-2": Case(
        STATES, "dp", mw.Parallelism(zero=2), lambda c: (1 + 3 / RANKS) * c.parameters,
        "weights / n and states / n, beside the weights that are gathered when the backward pass begins",
    ),
    "ZeRO-3": Case(
        STATES, "dp", mw.Parallelism(zero=3), lambda c: 4 / RANKS * c.parameters + 4 * c.block,
        "weights / n, gradients / n, states / n, beside two whole blocks, the gradients of one, and one in reduction",
    ),
    "tp": Case(
        ACTIVATIONS, "tp", mw.Parallelism(TENSOR_PLAN), lambda c: (c.blocks * (2 + 8 / RANKS) + 4) * c.stream,
        "2 + 8 / n of the stream for each block, beside the last stream and three gradients",
    ),
    "sp": Case(
        ACTIVATIONS, "tp", mw.Parallelism(SEQUENCE_PLAN), lambda c: (c.blocks * 10 / RANKS + 4) * c.stream,
        "(2 + 8) / n of the stream for each block, beside a gathered sequence and three gradients",
    ),
}  # fmt: skip


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the largest relative distance between measured memory and the formula."""
    del quick
    rows = {name: measured(name) for name in CASES}
    worst = max(abs(row["ratio"] - 1) for row in rows.values())
    return {
        "name": "zero_memory",
        "value": round(worst, 4),
        "goal": f"at most {GOAL} from the formula, for every stage of ZeRO and for sequence parallelism",
        "ok": worst <= GOAL,
        "details": {"ranks": RANKS, "MiB": rows},
    }


def measured(name: str) -> dict[str, Any]:
    """Return the MiB of the fullest rank, measured and by the formula."""
    with tempfile.TemporaryDirectory() as folder:
        if launch([__file__, name, folder], RANKS, ENVIRONMENT, timeout=300) != 0:
            raise RuntimeError(f"the processes of {name} failed")
        held = max(json.loads(path.read_text()) for path in Path(folder).iterdir())
    case = CASES[name]
    said = case.formula(case.chain)
    row = {"held": round(held / MIB, 1), "formula": round(said / MIB, 1), "says": case.says}
    return {**row, "ratio": round(held / said, 4)}


def one_rank(name: str, folder: Path) -> None:
    """Train one rank, and write the peak memory of this process, in bytes."""
    torch.set_num_threads(1)
    mw.init_process()
    case = CASES[name]
    step(case, *made(case, Chain(2, 64, case.chain.rows // 64)))  # import and plan before the measurement
    gc.collect()
    before = anonymous_bytes()
    model, optimizer, x = made(case, case.chain)
    with memory_samples() as peak:
        for _ in range(STEPS):
            step(case, model, optimizer, x)
    taken_off = case.chain.parameters // RANKS if case.axis == "tp" else 0
    (folder / os.environ["RANK"]).write_text(json.dumps(max(peak) - before - taken_off * 4))


def made(case: Case, chain: Chain) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    model = chain.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    mw.parallelize(model, optimizer, mw.ProcessMesh(list(range(RANKS)), [case.axis]), case.config)
    return model, optimizer, torch.randn(1, chain.rows, chain.width)


def step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def memory_samples() -> Iterator[list[int]]:
    """Yield a list that gets the memory of this process every millisecond until the end of the context."""
    found: list[int] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.001):
            found.append(anonymous_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def anonymous_bytes() -> int:
    """Return the bytes of anonymous resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not tell anonymous resident memory")


if __name__ == "__main__":
    one_rank(sys.argv[1], Path(sys.argv[2]))
