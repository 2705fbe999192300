"""Forward passes that call `requires_grad_` on parameters, as a training of two opponents does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.graph import CaptureError, SideEffectError


class Opponents(nn.Module):
    """A judge learns from what a maker makes, and the maker from a judge without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.judge = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        made = self.make(x)
        loss = F.softplus(self.judge(made.detach())).mean()
        self.judge.requires_grad_(False)
        loss = loss + F.softplus(-self.judge(made)).mean()
        self.judge.requires_grad_(True)
        return loss + self.judge(made.detach()).square().mean()


def trained(stages: int) -> list[Tensor]:
    torch.manual_seed(0)
    net = Opponents()
    if stages:
        mw.split_pipeline(net, mw.ProcessMesh(range(stages), ["pp"]), at=["judge.1"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    strategy = mw.Strategy.of(pipeline={"enable": True, "accumulate_steps": 2, "schedule_mode": "1F1B"})
    step = mw.to_static(net, None, None, optimizer, strategy) if stages else None
    for seed in range(2):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        if step is not None:
            step(x)
            continue
        net(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [mw.unshard_dtensor(p.detach()) for p in net.parameters()]


def test_parameters_get_gradients_of_the_uses_that_require_them() -> None:
    for found in mw.simulate(lambda: trained(2), 2):
        torch.testing.assert_close(found, trained(0), rtol=1e-5, atol=1e-6)


class Switching(nn.Module):
    def __init__(self, switch: Callable[[Switching], None]) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(3, 3), nn.Linear(3, 1).requires_grad_(False)
        self.beside, self.switch = [*self.trained.parameters()], switch

    def forward(self, x: Tensor) -> Tensor:
        x = self.trained(x)
        self.switch(self)
        return self.frozen(x).square().mean()


def _for_good(net: Switching) -> None:
    net.trained.bias.requires_grad_(False)


def _of_a_frozen_one(net: Switching) -> None:
    net.frozen.requires_grad_(True)


def _beside_the_module(net: Switching) -> None:
    net.beside[0].requires_grad = False


@pytest.mark.parametrize(
    ("switch", "error", "says"),
    [
        (_for_good, SideEffectError, "leaves it so"),
        (_of_a_frozen_one, CaptureError, "was frozen before the call"),
        (_beside_the_module, CaptureError, "beside the model's modules"),
    ],
)
def test_switches_that_a_program_cannot_hold_are_refused(
    switch: Callable[[Switching], None], error: type[Exception], says: str
) -> None:
    net = Switching(switch)
    optimizer = torch.optim.SGD(net.trained.parameters(), lr=0.1)
    with pytest.raises(error, match=says):
        mw.simulate(lambda: mw.to_static(net, None, None, optimizer)(torch.ones(2, 3)), 1)
