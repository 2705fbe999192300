"""Small models on several meshes, and the results of communication passes on their training steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.graph import Change, Conversion, Pass, Program, apply_passes, verify
from meshwright.models import Llama, LlamaConfig, mark

from .steps import Step, copied, numbers

SMALL = LlamaConfig(vocab=32, hidden=32, layers=2, heads=4, kv_heads=4, feed_forward=48)
CLOSE = 1e-6


@dataclass(frozen=True)
class Result:
    """Result of passes on a step: rank 0's program, the largest difference in any number, whether all bits agree."""

    program: Program
    error: float
    is_equal: bool

    @property
    def counts(self) -> dict[str, int]:
        return counted(self.program)

    def changes_by(self, by: str) -> list[Change]:
        """Return the changes that a pass wrote into the record."""
        return [change for change in self.program.changes if change.by == by]


def counted(program: Program, phase: str | None = None) -> dict[str, int]:
    """Return the number of collectives by kind and axes."""
    found: Counter[str] = Counter()
    for node in program.nodes:
        if isinstance(node.op, Conversion) and node.op.communicates and phase in (None, node.origin.phase):
            found[kind(node.op.step)] += 1
    return dict(found)


def kind(step: Any) -> str:
    """Return a step's name, axes and operation."""
    axes = [*getattr(step, "axes", ()), *(a for a, _ in getattr(step, "places", ()) if not hasattr(step, "axes"))]
    op = getattr(step, "op", "sum")
    told = " ".join([*axes, *([] if op == "sum" else [op])])
    return type(step).__name__ + (f"({told})" if told else "")


def after(step: Step, *passes: Pass) -> Result:
    """Return the step after the passes, compared with the step itself: the loss, and every parameter that it updates.

    The inputs of rank 0 are checked on fake tensors, and all ranks of a mesh must end with the same collectives.
    """
    programs = [apply_passes(program, passes) for program in step.programs]
    assert_agreed(programs)
    verify(programs[0], deep=not any(str(n.op).startswith("aten._local_scalar_dense") for n in programs[0].nodes))
    return compared(step, programs)


def assert_agreed(programs: Sequence[Program]) -> None:
    """Check that ranks of a mesh call the same collectives in the same order, and ranks of two the same exchanges."""
    ways = [
        [(n.op.step, n.op.src) for n in p.nodes if isinstance(n.op, Conversion) and n.op.communicates] for p in programs
    ]
    for mesh in {src.mesh for way in ways for _, src in way}:
        found = [[w for w in ways[r] if w[1].mesh is mesh] for r in mesh.process_ids]
        assert all(w == found[0] for w in found)


_RAN: dict[int, Any] = {}


def compared(step: Step, programs: Sequence[Program]) -> Result:
    """Return programs compared with those of a step."""
    if id(step) not in _RAN:
        _RAN[id(step)] = step, step.run()
    pairs = [
        (a.double(), b.double())
        for (out, written, _), (out2, written2, _) in zip(_RAN[id(step)][1], step.run(programs), strict=True)
        for a, b in zip(numbers((out, written)), numbers((out2, written2)), strict=True)
    ]
    error = max(float((a - b).abs().max()) for a, b in pairs if a.numel())
    return Result(programs[0], error, all(torch.equal(a, b) for a, b in pairs))


def mesh_of(**axes: int) -> mw.ProcessMesh:
    sizes = list(axes.values())
    return mw.ProcessMesh(np.arange(prod(sizes)).reshape(sizes), list(axes))


def placed(mesh: mw.ProcessMesh, **dims: int) -> list[Any]:
    """Return placements by axis, from the dim that each axis shards."""
    return [mw.Shard(dims[a]) if a in dims else mw.Replicate() for a in mesh.dim_names]


def step_of(
    model: Callable[[], nn.Module],
    batch: tuple[Any, ...],
    ranks: int,
    strategy: mw.Strategy | None = None,
    trains: bool = True,
) -> Step:
    """Return the first step of a model whose output is its loss, with gradient descent; or only its forward pass."""

    def rank() -> tuple[Program, tuple[Any, ...]]:
        m = model()
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1) if trains else None
        dist = mw.to_static(m, None, None, optimizer, strategy=bare() if strategy is None else strategy)
        dist(*batch)
        found = dist._latest
        assert found is not None
        return found.program, tuple(copied(fetch(batch)) for fetch in found.fetch)

    found = mw.simulate(rank, ranks)
    return Step(tuple(p for p, _ in found), tuple(x for _, x in found))


class MLP(nn.Module):
    """Two layers and their loss; the first is sharded by columns, the second by rows over "tp", the batch over "dp"."""

    def __init__(self, mesh: mw.ProcessMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mesh = mesh
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        if "tp" in mesh.dim_names:
            self.up.weight = mw.shard_tensor(self.up.weight, mesh, placed(mesh, tp=0))
            self.down.weight = mw.shard_tensor(self.down.weight, mesh, placed(mesh, tp=1))
        mw.shard_layer(self, mesh)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x, target = (mw.reshard(t, self.mesh, placed(self.mesh, dp=0)) for t in (x, target))
        return F.mse_loss(self.down(F.relu(self.up(x))), target)


def mlp_batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)


@cache
def mlp(rows: int = 8, **axes: int) -> Step:
    mesh = mesh_of(**axes)
    return step_of(lambda: MLP(mesh), mlp_batch(rows), mesh.size)


@cache
def llama(layers: int = 2, batch: int = 4, **axes: int) -> Step:
    """Return the Llama of the examples; axes "pp", "dp" and "tp", with one rank by default."""
    mesh = mesh_of(**{"pp": 1, "dp": 1, "tp": 1, **axes})

    return step_of(lambda: marked_llama(mesh, layers), llama_batch(batch), mesh.size)


def llama_batch(batch: int = 4) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, SMALL.vocab, (batch, 9), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@cache
def llama_with(*passes: Pass, stage: Any = 0, **axes: int) -> Step:
    """Return a step of one layer of the Llama under a strategy: passes, and the stage of ZeRO."""
    mesh = mesh_of(**{"pp": 1, "dp": 1, "tp": 1, **axes})
    strategy = bare(*passes)
    if stage:
        sharding = replace(strategy.sharding, enable=True, stage=stage, least=16, regather=False)
        strategy = replace(strategy, sharding=sharding)
    return step_of(lambda: marked_llama(mesh, 1), llama_batch(), mesh.size, strategy)


def bare(*passes: Pass) -> mw.Strategy:
    """Return a strategy with these passes and no other options."""
    base = mw.Strategy(inplace=False, passes=passes)
    off = [replace(section, enable=False) for section in (base.dp_optimization, base.mp_optimization)]
    return replace(base, dp_optimization=off[0], mp_optimization=off[1])


def marked_llama(mesh: mw.ProcessMesh, layers: int) -> Llama:
    model = Llama(LlamaConfig(SMALL.vocab, SMALL.hidden, layers, SMALL.heads, SMALL.kv_heads, SMALL.feed_forward), 0)
    mark(model, mesh)
    return model
