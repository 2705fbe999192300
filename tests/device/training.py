"""Training programs with data, tensor and ZeRO parallelism, for ranks on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.comm import current_communicator

STEPS = 2
KINDS = ("dp", "tp", "dp x tp", "ZeRO-1", "ZeRO-2", "ZeRO-3")


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.norm(torch.relu(self.up(x)))))


def _mesh(kind: str) -> mw.ProcessMesh:
    ranks = list(range(current_communicator().size))
    if kind == "dp x tp":
        half = len(ranks) // 2
        return mw.ProcessMesh([ranks[:half], ranks[half:]], ["dp", "tp"])
    return mw.ProcessMesh(ranks, ["tp" if kind == "tp" else "dp"])


def _shard(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
    if "tp" not in mesh.dim_names:
        return
    dims = {"up": {"weight": 0, "bias": 0}, "down": {"weight": 1}}.get(name, {})
    for parameter, dim in dims.items():
        placements = [mw.Shard(dim) if axis == "tp" else mw.Replicate() for axis in mesh.dim_names]
        setattr(layer, parameter, mw.shard_tensor(getattr(layer, parameter), mesh, placements))


def _stage(kind: str, model: nn.Module) -> Any:
    if kind == "ZeRO-1":
        return mw.ShardingStage1("dp", least=20)
    return {"ZeRO-2": mw.ShardingStage2, "ZeRO-3": mw.ShardingStage3}[kind]("dp", model, least=20)


class Training:
    """A model with one kind of parallelism on this rank, whose `step` is eager or static."""

    def __init__(
        self,
        kind: str,
        static: bool,
        device: torch.device | str,
        dropout: float = 0.0,
        strategy: mw.Strategy | None = None,
    ) -> None:
        mesh = _mesh(kind)
        self.model = Net(dropout).to(device)
        torch.manual_seed(1)
        mw.shard_layer(self.model, mesh, _shard)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-3)
        if kind.startswith("ZeRO"):
            mw.shard_optimizer(optimizer, _stage(kind, self.model))
        placements = [mw.Shard(0) if axis == "dp" else mw.Replicate() for axis in mesh.dim_names]
        self._batch = [
            mw.shard_tensor(torch.linspace(-1, 2, 128).view(8, 16).add(k).sin().to(device), mesh, placements)
            for k in range(2)
        ]
        self._step: Callable[[Tensor, Tensor], Tensor] = eager_step(self.model, optimizer)
        if static:
            self._step = mw.to_static(self.model, None, F.mse_loss, optimizer, strategy)

    def step(self) -> Tensor:
        """Make a training step and return its loss, which may not be computed yet."""
        return self._step(*self._batch)

    def parameters(self) -> list[Tensor]:
        """Return all parameters, whole and on the CPU."""
        return [mw.unshard_dtensor(p.detach()).cpu() for p in self.model.parameters()]


def train(
    kind: str,
    static: bool,
    device: torch.device | str,
    dropout: float = 0.0,
    strategy: mw.Strategy | None = None,
) -> tuple[list[Tensor], str]:
    """Return the losses and the parameters after some steps, on the CPU, and the calls of this rank in these steps."""
    current_communicator().seen.reset()
    training = Training(kind, static, device, dropout, strategy)
    losses = [torch.tensor(float(training.step()), device="cpu") for _ in range(STEPS)]
    calls = str(current_communicator().seen)
    return losses + training.parameters(), calls


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that makes an eager training step with a batch, and returns its loss."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
