"""Programs whose forward pass takes a derivative through an operator that hides what its backward pass reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

MESH = mw.ProcessMesh([0, 1], ["dp"])

LAYERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "layer norm": lambda net, h: F.layer_norm(h, (8,), net.scale, net.shift),
    "RMS norm": lambda net, h: F.rms_norm(h, (8,), net.scale),
    "group norm": lambda net, h: F.group_norm(h.view(-1, 8, 1), 2, net.scale, net.shift).view(-1, 8),
    "batch norm": lambda net, h: F.batch_norm(h, net.mean, net.variance, net.scale, net.shift, training=True),
    "instance norm": lambda net, h: F.instance_norm(h.view(-1, 2, 4)).view(-1, 8),
    "pooling": lambda net, h: F.max_pool1d(h.unsqueeze(1), 2).squeeze(1).repeat(1, 2),
    "dropout": lambda net, h: F.dropout(h, 0.5),
    "cross entropy": lambda net, h: h * F.cross_entropy(h, torch.zeros(len(h), dtype=torch.long)),
    "cosine similarity": lambda net, h: h * F.cosine_similarity(h, h + 1).unsqueeze(1),
}


class Critic(nn.Module):
    """A loss with a penalty of the gradient for its input."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.enter, self.leave, self.layer = nn.Linear(6, 8), nn.Linear(8, 1), LAYERS[name]
        self.scale, self.shift = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.rand(8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        score = self.leave(self.layer(self, self.enter(x).tanh()).tanh())
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return slope.square().mean() + score.mean()


def trained(name: str, is_static: bool) -> list[Tensor]:
    """Return loss, parameters and buffers after two steps, on one device or as a program on two ranks."""
    torch.manual_seed(0)
    net, x = Critic(name), torch.randn(8, 6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if is_static:
        mw.shard_layer(net, MESH)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        step, x = mw.to_static(net, None, None, optimizer), mw.shard_tensor(x, MESH, [mw.Shard(0)])
    else:
        step = one_device(net, optimizer)
    torch.manual_seed(1)
    losses = [step(x).detach() for _ in range(2)]
    return [mw.unshard_dtensor(t).clone() for t in (*losses, *net.state_dict().values())]


def one_device(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = net(x)
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("name", LAYERS)
def test_a_penalty_of_gradients_through(name: str) -> None:
    wanted = trained(name, is_static=False)
    for found in mw.simulate(lambda: trained(name, is_static=True), 2):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
