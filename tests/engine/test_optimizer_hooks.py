"""Hooks of optimizers in static steps: their changes to known parameters are part of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

from .oracle import compare, whole


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 15), nn.Linear(15, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


Hook = Callable[[Net, list[Tensor], Any], Any]
"""A function of the module, its parameters in a list, and the optimizer."""

BEFORE: dict[str, Hook] = {
    "clips gradients of the module": lambda net, known, _: nn.utils.clip_grad_norm_(net.parameters(), 0.05),
    "clips gradients of a list": lambda net, known, _: nn.utils.clip_grad_value_(known, 0.01),
    "clips gradients of the groups": lambda net, known, o: nn.utils.clip_grad_norm_(o.param_groups[0]["params"], 0.05),
    "scales one gradient": lambda net, known, _: known[0].grad.mul_(0.5),
    "sets a gradient": lambda net, known, _: setattr(net.last.weight, "grad", torch.sign(known[2].grad)),
    "adds a weight to its gradient": lambda net, known, _: known[2].grad.add_(net.last.weight, alpha=0.1),
    "decays weights": lambda net, known, _: torch._foreach_mul_(known, 0.9),
}
AFTER: dict[str, Hook] = {
    "clamps a weight": lambda net, known, _: net.first.weight.clamp_(-0.2, 0.2),
    "writes data": lambda net, known, _: known[2].data.mul_(0.9),
    "normalizes a weight": lambda net, known, _: known[0].copy_(F.normalize(net.first.weight, dim=1)),
}
STRATEGIES: dict[str, Any] = {
    "replicas": {},
    "optimizer states sharded": {"sharding": {"enable": True, "stage": 1, "least": 1}},
    "parameters sharded": {"sharding": {"enable": True, "stage": 3, "least": 1}},
}


def trained(hook: str, strategy: str | None) -> Any:
    torch.manual_seed(0)
    net = Net() if strategy is None else mw.shard_layer(Net(), mw.init_mesh(dp=3))
    known = list(net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)

    def call(optimizer: Any, *_: Any) -> None:
        with torch.no_grad():
            (BEFORE | AFTER)[hook](net, known, optimizer)

    (optimizer.register_step_pre_hook if hook in BEFORE else optimizer.register_step_post_hook)(call)
    x, y = torch.linspace(-2, 2, 56).reshape(7, 8), torch.linspace(0, 3, 28).reshape(7, 4)
    if strategy is not None:
        step: Any = mw.to_static(net, None, F.mse_loss, optimizer, mw.Strategy.of(**STRATEGIES[strategy]))
        losses = [step(x * n, y) for n in (1, 2, 3)]
        return whole([losses, dict(net.state_dict())])
    losses = []
    for n in (1, 2, 3):
        losses.append(F.mse_loss(net(x * n), y))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole([losses, dict(net.state_dict())])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hook", [*BEFORE, *AFTER])
def test_a_hook_has_the_same_effect_in_a_program_as_in_eager_mode(hook: str, strategy: str) -> None:
    wanted = trained(hook, None)
    mw.simulate(lambda: compare(trained(hook, strategy), wanted, {"rtol": 1e-4, "atol": 1e-6}), 3)
