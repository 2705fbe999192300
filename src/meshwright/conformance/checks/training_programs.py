"""Training programs of level 4: small models with each kind of parallelism, and the same steps on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.comm import current_communicator
from meshwright.engine import (
    ShardingStage1,
    ShardingStage2,
    ShardingStage3,
    Strategy,
    context_parallel,
    dispatch_experts,
    reshard,
    shard_layer,
    shard_optimizer,
    shard_tensor,
    split_pipeline,
    to_static,
)
from meshwright.layout import ProcessMesh, Replicate, Shard

from .comparison import on_cpu

STEPS, BLOCKS = 2, 4
Step = Callable[[], Tensor]


class Perceptron(nn.Module):
    """Two linear layers with a norm and dropout between them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.norm(torch.relu(self.up(x)))))


class Attention(nn.Module):
    """Causal attention over sequences of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """A mixture of four experts, of which each row uses two."""

    def __init__(self, dispatches: bool) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.up, self.down = (
            nn.Parameter(torch.randn(4, 16, 32, device="cpu") / 4),
            nn.Parameter(torch.randn(4, 32, 16, device="cpu") / 4),
        )
        self.dispatches = dispatches

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.router(x).softmax(-1).topk(2)
        if self.dispatches:
            return dispatch_experts(x, indices, weights, self.made, [self.up, self.down])
        ids, order = indices.reshape(-1).sort()
        ends = torch.histc(ids.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        made = self.made(x[order // 2], ends, self.up, self.down)
        return (made[order.argsort()].unflatten(0, (-1, 2)) * weights.unsqueeze(-1)).sum(1)

    @staticmethod
    def made(rows: Tensor, ends: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.grouped_mm(F.silu(F.grouped_mm(rows, up, offs=ends)), down, offs=ends)


class Images(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 1, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x.view(8, 1, 4, 4))))).flatten(1)


class Words(nn.Module):
    """An embedding and an output layer with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(16, 16), nn.RMSNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x * 3).long().remainder(16)
        return (self.norm(self.embed(tokens)) @ self.embed.weight.t()).mean(1)


def blocks() -> nn.Module:
    """Return blocks in a row, for pipelines."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(BLOCKS)))


@dataclass(frozen=True, slots=True)
class Program:
    """A model, its parallelism, and the options of its steps.

    `axes` are the sizes of the mesh. `shards` maps names of layers to the dim of each parameter that `axis` shards.
    `batch` is the dim of the inputs that `axis` shards, if any.
    """

    model: Callable[[], nn.Module] = Perceptron
    axes: Mapping[str, int] = field(default_factory=lambda: {"dp": 2})
    shards: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    axis: str = "tp"
    batch: Mapping[str, int] = field(default_factory=lambda: {"dp": 0})
    shape: tuple[int, ...] = (8, 16)
    zero: int = 0
    context: Any = None
    way: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    strategy: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def ranks(self) -> int:
        count = 1
        for size in self.axes.values():
            count *= size
        return count


class Run:
    """A program on this rank; `step` makes the next training step, eager or static, and returns the loss."""

    def __init__(self, program: Program, device: torch.device, static: bool, on_mesh: bool, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.program, self.device, self.on_mesh = program, device, on_mesh
        self.model = _on_device(program.model, device)
        sizes = list(program.axes.values())
        ranks = torch.arange(program.ranks, device="cpu").view(sizes).tolist()
        self.mesh = ProcessMesh(ranks, list(program.axes))
        torch.manual_seed(seed + 1)
        if on_mesh:
            self._distribute()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-3)
        if on_mesh and program.zero:
            shard_optimizer(self.optimizer, self._stage())
        self.batch = [self._input(k) for k in range(2)]
        self.trained: Any = self.model
        self.step: Step = self._eager_step
        if static:
            self.trained = to_static(
                self.model, None, self._loss, self.optimizer, Strategy.of(**program.strategy) if on_mesh else None
            )
            self.step = self._static_step

    def _distribute(self) -> None:
        if self.program.way:
            size = BLOCKS // len(self.program.way)
            starts = [str(block) for block in range(size, BLOCKS, size)]
            split_pipeline(self.model, self.mesh, at=starts, way=self.program.way)
        else:
            shard_layer(self.model, self.mesh, self._shard)

    def _shard(self, name: str, layer: nn.Module, mesh: ProcessMesh) -> None:
        dims = self.program.shards.get(name.rpartition(".")[2], {})
        for key, dim in dims.items():
            placements = [Shard(dim) if axis == self.program.axis else Replicate() for axis in mesh.dim_names]
            setattr(layer, key, shard_tensor(getattr(layer, key), mesh, placements))

    def _stage(self) -> Any:
        if self.program.zero == 1:
            return ShardingStage1("dp", least=20)
        return {2: ShardingStage2, 3: ShardingStage3}[self.program.zero]("dp", self.model, least=20)

    def _input(self, k: int) -> Tensor:
        count = torch.Size(self.program.shape).numel()
        x = torch.linspace(-1, 2, count, device="cpu").view(self.program.shape).add(k).mul(40).sin().to(self.device)
        if not self.on_mesh or self.program.way:
            return x
        dims = self.program.batch
        placements = [Shard(dims[axis]) if axis in dims else Replicate() for axis in self.mesh.dim_names]
        return shard_tensor(x, self.mesh, placements)

    def _loss(self, out: Tensor, y: Tensor) -> Tensor:
        if self.on_mesh and self.program.way:
            y = reshard(y, self.mesh["pp", self.program.way[-1]], [Replicate()])
        return F.mse_loss(out.float(), y)

    def _call(self, step: Callable[[], Tensor]) -> Tensor:
        if self.program.context is None or not self.on_mesh:
            return step()
        with context_parallel(self.program.context):
            return step()

    def _static_step(self) -> Tensor:
        return self._call(lambda: self.trained(*self.batch))

    def _eager_step(self) -> Tensor:
        return self._call(self._make_eager_step)

    def _make_eager_step(self) -> Tensor:
        x, y = self.batch
        dtype = self.program.dtype
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            out = self.model(x)
        loss = self._loss(out, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def train(self, steps: int = STEPS) -> list[Tensor]:
        """Make steps; return their losses, and then the parameters and buffers, whole and on the CPU."""
        losses = [on_cpu(self.step()) for _ in range(steps)]
        return losses + self.state()

    def state(self) -> list[Tensor]:
        return [on_cpu(x) for x in self.model.state_dict().values()]


def _on_device(model: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """Return the model with parameters that are drawn on the CPU, the same for every device."""
    with torch.device("cpu"):
        return model().to(device)


def trained(program: Program, device: torch.device, static: bool) -> list[Tensor]:
    """Return losses and state after training on the ranks of this communicator."""
    assert current_communicator().size == program.ranks
    return Run(program, device, static, on_mesh=True).train()


def trained_alone(program: Program, device: torch.device) -> list[Tensor]:
    """Return losses and state after the same steps on one device, without marks."""
    return Run(program, device, static=False, on_mesh=False).train()
