"""Weights and activations that a forward pass first reads without gradients, under every option of a strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import meshwright as mw

from .oracle import compare, whole

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stage 2": {"sharding": {"enable": True, "stage": 2, "least": 1}},
    "stage 3": {"sharding": {"enable": True, "stage": 3, "least": 1}},
    "stage 3, held": {"sharding": {"enable": True, "stage": 3, "least": 1, "regather": False}},
    "sequence": {"sp_optimization": {"enable": True}},
    "recompute": {"recompute": {"enable": True, "layers": ["*"]}},
    "fused": {"fused_passes": {"enable": True}},
}


class Glances(nn.Module):
    """A model that scales by the size of its input, which it reads without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 12)
        self.normed = spectral_norm(nn.Linear(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = self.up(x).square().mean((0, 1)).sqrt()
        x = x + self.down(self.up(x).relu() / size)
        with torch.no_grad():
            largest = self.head(x).abs().amax((1, 2), keepdim=True)
        return self.normed(self.head(x) / largest).square().mean()


def trained(options: dict[str, Any] | None) -> Any:
    torch.manual_seed(0)
    model = Glances()
    mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    if options is not None:
        plan = {"up": mw.ColwiseParallel(), "down": mw.RowwiseParallel(), "head": mw.ColwiseParallel()}
        mw.parallelize(model, None, mesh, mw.Parallelism(plan))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step: Any = None if options is None else mw.to_static(model, None, None, optimizer, mw.Strategy.of(**options))
    losses: list[Tensor] = []
    for seed in range(3):
        x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(seed))
        if step is not None:
            losses.append(step(mw.shard_tensor(x, mesh, [mw.Shard(0)])))
            continue
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return whole([losses, dict(model.state_dict())])


@pytest.mark.parametrize("name", OPTIONS)
def test_a_read_without_gradients_keeps_gradients(name: str) -> None:
    wanted = trained(None)
    mw.simulate(lambda: compare(trained(OPTIONS[name]), wanted, {"rtol": 1e-5, "atol": 1e-6}), 4)
