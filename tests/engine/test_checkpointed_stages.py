"""Layers in `torch.utils.checkpoint` on several pipeline stages: eager gradients are those of one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw


class OneByOne(nn.Module):
    """Each layer is a checkpointed call, also the one at which a stage begins."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Together(nn.Module):
    """One checkpointed call has layers of both stages; they read `skip`, and so does the head, outside the call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.first.weight

    def inside(self, x: Tensor, skip: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh() * skip + skip.sin()
        return x * skip

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x).sigmoid()
        return self.head(checkpoint(self.inside, skip, skip, use_reentrant=False)) * skip


def gradients(kind: Callable[[], nn.Module], schedule: str | None, in_stages: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model, x, y = kind(), torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    mesh, loss = mw.ProcessMesh([0, 1], ["pp"]), nn.functional.mse_loss
    if in_stages:
        mw.split_pipeline(model, mesh, at=["layers.1"])
    if in_stages and schedule is not None:
        mw.microbatched(model, loss, mesh, 2, schedule)(x, y)
    else:
        count = 1 if schedule is None else 2
        for a, b in zip(x.chunk(count), y.chunk(count), strict=True):
            (loss(model(a), b) / count).backward()
    found = [p.grad for p in model.parameters()]
    return [mw.unshard_dtensor(g) for g in found if g is not None]


@pytest.mark.parametrize("schedule", [None, "1F1B", "GPipe"])
@pytest.mark.parametrize("kind", [lambda: OneByOne(True), lambda: OneByOne(False), Together])
def test_gradients_are_those_of_one_device(kind: Callable[[], nn.Module], schedule: str | None) -> None:
    one = gradients(kind, schedule, in_stages=False)
    for found in mw.simulate(lambda: gradients(kind, schedule, in_stages=True), 2):
        torch.testing.assert_close(found, one)
