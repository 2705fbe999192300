"""Communication of static programs for the common kinds of parallelism: golden texts that hold.

Programs come from `to_static` without options, or with the options that a text shows. A text gives its law and every
collective of one training step in order, as rank 0 calls it (`golden/*.txt`). It holds if the program still has this
text, and one more layer adds exactly the collectives of the law. To write the texts again for review, run:
`python -c "from benchmarks.communications import write; write()"`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import PeerlessCommunicator, using_communicator
from meshwright.engine import strategy_from_toml
from meshwright.graph import Program, communication, communication_text
from meshwright.models import Llama, LlamaConfig, mark

GOLDEN = Path(__file__).parent / "golden"
BATCH, LENGTH = 8, 16
Growth = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Case:
    """A program and its law: `per_layer` has, by phase, the collectives that each further layer adds."""

    name: str
    law: str
    axes: Mapping[str, int]
    options: tuple[str, ...] = ()
    per_layer: Growth | None = None
    program: Callable[[Case, int], Program] | None = None
    show: Literal["communication", "program"] = "communication"

    @property
    def strategy(self) -> mw.Strategy:
        return strategy_from_toml("\n".join(self.options))

    def recorded(self, layers: int = 2) -> Program:
        return (self.program or llama)(self, layers)

    def text(self) -> str:
        program = self.recorded()
        body = program.text() if self.show == "program" else communication_text(program)
        mesh = " × ".join(f"{n} {axis}" for axis, n in self.axes.items())
        options = f"; options: {', '.join(self.options)}" if self.options else ""
        return f"# {self.name}: {mesh}{options}\n# {self.law}\n\n{body}\n"

    def holds(self) -> bool:
        """True if the text equals the golden one, and one more layer adds the collectives of the law."""
        path = GOLDEN / f"{self.name}.txt"
        same = path.exists() and path.read_text() == self.text()
        return same and (self.per_layer is None or self.growth() == self.per_layer)

    def growth(self) -> Growth:
        """Return the collectives that each further layer adds, by phase; ValueError if the third layer adds others."""
        one, two, three = (dict(counted(self.recorded(n))) for n in (1, 2, 3))
        found = [
            {p: dict(b[p] - a.get(p, Counter())) for p in b if b[p] != a.get(p)} for a, b in pairwise([one, two, three])
        ]
        if found[0] != found[1]:
            raise ValueError(f"{self.name}: the second layer adds {found[0]}, the third {found[1]}")
        return {phase: found for phase, found in found[0].items() if found}


def counted(program: Program) -> Iterator[tuple[str, Counter[str]]]:
    """Yield each phase and its number of collectives by kind."""
    for phase in ("forward", "backward", "update"):
        yield phase, Counter(repr(node.op).split(",")[0].rstrip(")") + ")" for node in communication(program, phase))


def recorded(model: nn.Module, batch: tuple[Any, ...], strategy: mw.Strategy, trains: bool = True) -> Program:
    """Return the program of one step, recorded for the caller's communicator."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if trains else None
    static = mw.to_static(model, None, None, optimizer, strategy=strategy)
    static(*batch)
    return static.program


def mesh_of(axes: Mapping[str, int]) -> mw.ProcessMesh:
    return mw.ProcessMesh(np.arange(prod(axes.values())).reshape(list(axes.values())), list(axes))


def llama(case: Case, layers: int, micro_batches: int = 1) -> Program:
    """Return the program of a Llama with `layers` blocks on the case's mesh, under its strategy."""
    config = LlamaConfig(vocab=64, hidden=32, layers=layers, heads=4, kv_heads=4, feed_forward=48)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    with using_communicator(PeerlessCommunicator(0, prod(case.axes.values()))):
        model = Llama(config, 0)
        mark(model, mesh_of({"pp": 1, "dp": 1, "tp": 1, **case.axes}))
        whole = model if micro_batches == 1 else Accumulated(model, micro_batches)
        return recorded(whole, (tokens, tokens), case.strategy)


class Accumulated(nn.Module):
    """The mean loss of several micro-batches."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.model, self.count = model, count

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        parts = zip(tokens.chunk(self.count), targets.chunk(self.count), strict=True)
        return torch.stack([self.model(*part) for part in parts]).mean()


def over_nodes(case: Case, layers: int) -> Program:
    """Return the program of linear layers with a batch that is sharded over nodes and over the ranks of each."""
    mesh = mesh_of(case.axes)

    class Layers(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(mw.reshard(x, mesh, [mw.Shard(0), mw.Shard(0)])).square().mean()

    with using_communicator(PeerlessCommunicator(0, mesh.size)):
        model = Layers(*[nn.Linear(32, 32) for _ in range(layers)])
        mw.shard_layer(model, mesh)
        return recorded(model, (torch.zeros(BATCH, 32),), case.strategy)


def seed(case: Case, layers: int) -> Program:
    """Return the program of `relu(a @ b)` with b sharded by rows: the product has a pending sum over the ranks."""
    mesh = mesh_of(case.axes)

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Parameter(mw.shard_tensor(torch.zeros(8, 6), mesh, [mw.Shard(0)]))

        def forward(self, a: Tensor) -> Tensor:
            return F.relu(torch.matmul(mw.reshard(a, mesh, [mw.Replicate()]), self.b))

    with using_communicator(PeerlessCommunicator(0, mesh.size)):
        return recorded(Product(), (torch.zeros(4, 8),), case.strategy, trains=False)


def zero(stage: int, *more: str) -> tuple[str, ...]:
    return ("sharding.enable = true", f"sharding.stage = {stage}", "sharding.least = 16", *more)


TWO_SUMS = {"forward": {"AllReduce(tp)": 2}, "backward": {"AllReduce(tp)": 2}}
TWO_OF_EACH = {phase: {"ReduceScatter(tp)": 2, "AllGather(tp)": 2} for phase in ("forward", "backward")}
NO_BUCKETS = "dp_optimization.enable = false"
SMALL_BUCKETS = (NO_BUCKETS, 'passes = [{name = "bucket", bytes = 32768}]')
OVER_NODES = ('passes = [{name = "hierarchy", inner = ["gpu"], outer = ["node"], least = 0}]',)
CASES = (
    Case(
        "megatron", "each layer: two all-reduces forward and two backward; else what embedding, head and loss need",
        {"tp": 4}, per_layer=TWO_SUMS,
    ),
    Case(
        "sequence_parallel", "each layer: two gathers and two reduce-scatters each way; norms' gradients in one bucket",
        {"tp": 4}, ("sp_optimization.enable = true",), TWO_OF_EACH,
    ),
    Case(
        "data_parallel", "gradients are one bucket; the number of tokens is needed at once",
        {"dp": 4}, per_layer={},
    ),
    Case(
        "data_parallel_buckets", "one all-reduce for each bucket of gradients",
        {"dp": 4}, SMALL_BUCKETS,
    ),
    Case(
        "data_and_tensor_parallel", "the sums of tensor parallelism, and one bucket of gradients",
        {"dp": 2, "tp": 2}, per_layer=TWO_SUMS,
    ),
    Case(
        "micro_batches", "gradients of two micro-batches are added up where they are, and reduced once",
        {"dp": 2}, per_layer={}, program=lambda case, n: llama(case, n, micro_batches=2),
    ),
    Case(
        "zero_2", "gradients are reduced to the part that each rank updates, and the parts of parameters gathered",
        {"dp": 4}, zero(2), per_layer={},
    ),
    Case(
        "zero_3", "each weight is gathered forward and again backward, and its gradient reduce-scattered once",
        {"dp": 4}, zero(3, NO_BUCKETS),
        {"forward": {"AllGather(dp)": 9}, "backward": {"AllGather(dp)": 9, "ReduceScatter(dp)": 9}},
    ),
    Case(
        "zero_3_buckets", "the same in buckets",
        {"dp": 4}, zero(3, *SMALL_BUCKETS),
    ),
    Case(
        "pipeline", "one exchange forward and one backward between the stages; the loss goes to all ranks",
        {"pp": 2, "dp": 2},
    ),
    Case(
        "nodes", "sums of gradients cross nodes in pieces: reduce-scatter in the node, all-reduce across, gather",
        {"node": 2, "gpu": 2}, OVER_NODES, per_layer={}, program=over_nodes,
    ),
    Case(
        "seed", "a product with a matrix that is cut by rows: split, matmul, all-reduce, relu",
        {"tp": 2}, ("inplace = false",), program=seed, show="program",
    ),
)  # fmt: skip


def write() -> None:
    """Write every golden text again."""
    GOLDEN.mkdir(exist_ok=True)
    for case in CASES:
        (GOLDEN / f"{case.name}.txt").write_text(case.text())


def run(quick: bool = False) -> dict[str, Any]:
    """Return the figure: the number of golden texts that hold."""
    cases = CASES[::4] if quick else CASES
    held = {case.name: case.holds() for case in cases}
    return {
        "name": "communications",
        "value": sum(held.values()),
        "goal": f"all {len(cases)} golden texts hold",
        "ok": all(held.values()),
        "details": {"holds": held},
    }


if __name__ == "__main__":
    print(json.dumps(run()))
