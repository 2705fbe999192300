"""Writes without gradients change numbers alone: the tensor's gradients stay, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

from .static_oracle import step_of


class Net(nn.Module):
    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.table, self.act = nn.Linear(5, 3), nn.Embedding(4, 5, max_norm=0.5), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, x)


def _normalised(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.layer.weight.div_(net.layer.weight.norm(dim=1, keepdim=True))
    return net.layer(x)


def _by_copy(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.layer.weight.copy_(net.layer.weight * 0.9)
    y = net.layer(x)
    with torch.no_grad():
        net.layer.bias.mul_(0.9)
    return y + net.layer.bias


def _one_row(net: Any, x: Tensor) -> Tensor:
    row = net.layer.weight[1]
    with torch.no_grad():
        row.mul_(0.5)
        net.layer.weight[2, :3].clamp_(-0.1, 0.1)
    return net.layer(x) + row.sum()


def _by_data(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.layer.weight.data.clamp_(-0.2, 0.2)
        net.layer.bias.detach().mul_(0.5)
    return net.layer(x)


def _of_a_result(net: Any, x: Tensor) -> Tensor:
    y = net.layer(x)
    with torch.no_grad():
        y.mul_(2)
        y[:, 1].zero_()
    return y + net.layer.bias


def _renormed(net: Any, x: Tensor) -> Tensor:
    return net.layer(net.table(x.long().abs()[:, 0] % 4))


ACTS = (_normalised, _by_copy, _one_row, _by_data, _of_a_result, _renormed)


def _trained(act: Callable[[Any, Tensor], Tensor], mesh: mw.ProcessMesh | None) -> list[float]:
    torch.manual_seed(0)
    net = Net(act)
    x, y = torch.randn(8, 5), torch.randn(8, 3)
    if mesh is not None:
        weight = mw.shard_tensor(net.layer.weight, mesh, [mw.Shard(0)])
        net.layer.weight = weight  # pyright: ignore[reportAttributeAccessIssue] - a parameter stays one
        mw.shard_layer(net, mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    step = step_of(net, F.mse_loss, optimizer, static=mesh is not None)
    found = [step(x, y).item() for _ in range(3)]
    return [*found, *(p.detach().sum().item() for p in net.parameters())]


@pytest.mark.filterwarnings("ignore:.*embedding_renorm")
@pytest.mark.parametrize("act", ACTS)
def test_gradients_stay(act: Callable[[Any, Tensor], Tensor]) -> None:
    mesh = mw.ProcessMesh([0, 1], ["tp"])
    for found in mw.simulate(_trained, 2, act, mesh):
        torch.testing.assert_close(found, _trained(act, None), rtol=1e-5, atol=1e-5)
