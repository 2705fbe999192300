"""Torch's own objects that a step reads, such as rates, schedules and samplers: a change is detected, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import meshwright as mw

from .static_oracle import step_of


@dataclass(frozen=True, slots=True)
class Read:
    """A factor of the loss, and a function that runs after each step with its number."""

    factor: Callable[[], Any]
    change: Callable[[int], Any]


def _other() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


def _rate(optimizer: Any) -> Read:
    group = optimizer.param_groups[0]
    return Read(lambda: optimizer.param_groups[0]["lr"], lambda at: group.update(lr=group["lr"] * 0.5))


def _schedule(optimizer: Any) -> Read:
    schedule = StepLR(optimizer, 1, 0.5)
    return Read(lambda: (1 + schedule.last_epoch) * schedule.get_last_lr()[0], lambda at: schedule.step())


def _other_schedule(optimizer: Any) -> Read:
    other = _other()
    read = _schedule(other)
    return Read(read.factor, lambda at: (other.step(), read.change(at)))


def _distribution(optimizer: Any) -> Read:
    prior = torch.distributions.Normal(torch.tensor(0.0), torch.tensor(1.0))
    return Read(prior.entropy, lambda at: setattr(prior, "scale", torch.tensor(at + 2.0)))


def _sampler(optimizer: Any) -> Read:
    sampler = DistributedSampler(TensorDataset(torch.zeros(4)), num_replicas=1, rank=0)
    return Read(lambda: sampler.epoch + 1, sampler.set_epoch)


def _loader(optimizer: Any) -> Read:
    loader = DataLoader(TensorDataset(torch.zeros(4)), 2)
    return Read(lambda: len(loader), lambda at: setattr(loader.dataset, "tensors", (torch.zeros(2 * at + 2),)))


READS: dict[str, Callable[[Any], Read]] = {
    "rate": _rate,
    "rate of another optimizer": lambda optimizer: _rate(_other()),
    "schedule": _schedule,
    "schedule of another optimizer": _other_schedule,
    "distribution": _distribution,
    "sampler": _sampler,
    "loader": _loader,
}


def _trained(name: str, by_hook: bool, static: bool) -> list[float]:
    torch.manual_seed(0)
    net: Any = nn.Linear(5, 3)
    x, y = torch.randn(8, 5), torch.randn(8, 3)
    if static:
        mesh = mw.init_mesh(dp=-1)
        net = mw.shard_layer(net, mesh)
        x, y = (mw.shard_tensor(t, mesh, [mw.Shard(0)]) for t in (x, y))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    read = READS[name](optimizer)

    def loss(out: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(out, wanted) * (1 if by_hook else read.factor())

    if by_hook:
        net.weight.register_hook(lambda grad: grad * read.factor())
    step = step_of(net, loss, optimizer, static)
    found: list[float] = []
    for at in range(4):
        found.append(step(x, y).item())
        read.change(at)
    return found


@pytest.mark.parametrize("by_hook", [False, True])
@pytest.mark.parametrize("name", [name for name in READS if name != "distribution"])
def test_a_change_is_detected(name: str, by_hook: bool) -> None:
    for found in mw.simulate(_trained, 2, name, by_hook, True):
        torch.testing.assert_close(found, _trained(name, by_hook, False), rtol=1e-5, atol=1e-6)


def test_a_change_of_a_distribution_is_detected() -> None:
    found = mw.simulate(_trained, 2, "distribution", False, True)[1]
    torch.testing.assert_close(found, _trained("distribution", False, False), rtol=1e-5, atol=1e-6)


def _reads_states() -> None:
    net = nn.Linear(5, 3)
    optimizer = torch.optim.Adam(net.parameters())

    def loss(out: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(out, wanted) * (1 + len(optimizer.state))

    step = mw.to_static(net, None, loss, optimizer)
    step(torch.ones(8, 5), torch.ones(8, 3))


def test_states_cannot_be_read() -> None:
    with pytest.raises(mw.MeshwrightError, match=r"reads optimizer\.state"):
        mw.simulate(_reads_states, 1)
