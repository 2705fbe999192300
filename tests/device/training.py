"""Training programs with each kind of parallelism, for ranks on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import current_communicator

from .models import Loss, Marked, mesh_of, with_experts, with_ring, with_stages, with_words

STEPS = 2
KINDS = ("dp", "tp", "dp x tp", "ZeRO-1", "ZeRO-2", "ZeRO-3")
"""Kinds of parallelism for a model of linear layers; `Training` knows more."""


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.norm(torch.relu(self.up(x)))))


def _shard(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
    if "tp" not in mesh.dim_names:
        return
    dims = {"up": {"weight": 0, "bias": 0}, "down": {"weight": 1}}.get(name, {})
    for parameter, dim in dims.items():
        placements = [mw.Shard(dim) if axis == "tp" else mw.Replicate() for axis in mesh.dim_names]
        setattr(layer, parameter, mw.shard_tensor(getattr(layer, parameter), mesh, placements))


def _of_linear_layers(kind: str, device: torch.device | str, dropout: float) -> Marked:
    mesh = mesh_of(*(kind.split(" x ") if kind in ("tp", "dp x tp") else ["dp"]))
    model = Net(dropout).to(device)
    torch.manual_seed(1)
    mw.shard_layer(model, mesh, _shard)
    placements = [mw.Shard(0) if axis == "dp" else mw.Replicate() for axis in mesh.dim_names]
    x, y = (
        mw.shard_tensor(torch.linspace(-1, 2, 128).view(8, 16).add(k).sin().to(device), mesh, placements)
        for k in range(2)
    )
    return Marked(model, (x, y))


_OTHERS: dict[str, Callable[[torch.device | str], Marked]] = {
    "cp": lambda device: with_ring(device, "cp"),
    "dp x cp": lambda device: with_ring(device, "dp", "cp"),
    "ep": lambda device: with_experts(device, "ep"),
    "dp x ep": lambda device: with_experts(device, "dp", "ep"),
    "pp": lambda device: with_stages(device, "pp"),
    "pp x dp": lambda device: with_stages(device, "pp", "dp"),
    "words, tp": lambda device: with_words(device, _shard, "tp"),
    "words, ZeRO-3": lambda device: with_words(device, _shard, "dp"),
}
"""Kind of parallelism → the marked model, for models of other layers."""


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
        capturable: bool = False,
    ) -> None:
        torch.manual_seed(0)
        marked = _OTHERS[kind](device) if kind in _OTHERS else _of_linear_layers(kind, device, dropout)
        self.model, self.batch = marked.model, marked.batch
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-3, capturable=capturable)
        stage = kind.removeprefix("words, ")
        if stage.startswith("ZeRO"):
            mw.shard_optimizer(self.optimizer, _stage(stage, self.model))
        self._step: Loss = eager_step(self.model, marked.loss, self.optimizer)
        if static:
            self._step = mw.to_static(self.model, None, marked.loss, self.optimizer, strategy)

    def step(self, *batch: Tensor) -> Tensor:
        """Make a training step, with another batch if one is given; return its loss, which may not be computed yet."""
        return self._step(*(batch or self.batch))

    def parameters(self) -> list[Tensor]:
        """Return all parameters, whole and on the CPU."""
        return [mw.unshard_dtensor(p.detach()).cpu() for p in self.model.parameters()]


def _nothing(training: Training) -> list[Tensor]:
    return []


def train(
    kind: str,
    static: bool,
    device: torch.device | str,
    dropout: float = 0.0,
    strategy: mw.Strategy | None = None,
    between: Callable[[Training], list[Tensor]] = _nothing,
) -> tuple[list[Tensor], str]:
    """Return the losses, what `between` returns after each step, and the parameters, all on the CPU; and the calls."""
    current_communicator().seen.reset()
    training = Training(kind, static, device, dropout, strategy)
    found: list[Tensor] = []
    for _ in range(STEPS):
        found += [torch.tensor(float(training.step()), device="cpu"), *between(training)]
    calls = str(current_communicator().seen)
    return found + training.parameters(), calls


def eager_step(model: nn.Module, loss_of: Loss, optimizer: torch.optim.Optimizer) -> Loss:
    """Return a function that makes an eager training step with a batch, and returns its loss."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
