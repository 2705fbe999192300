"""Parameters and buffers that each microbatch of a pipeline renews: the numbers of one device, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.pipeline import StageError


class Renewing(nn.Module):
    """Layers with a buffer and a parameter between them, which `renew` changes before or after they are read."""

    scale: Tensor

    def __init__(self, before: Renewal, after: Renewal) -> None:
        super().__init__()
        self.layers, self.before, self.after = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), before, after
        self.register_buffer("scale", torch.ones(3))
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.layers
        self.before(self)
        x = second(first(x * self.gain) * self.scale)
        self.after(self)
        return third(x.tanh()).square().mean()


Renewal = Callable[[Renewing], None]


def nothing(net: Renewing) -> None:
    del net


def write(net: Renewing) -> None:
    net.scale.mul_(0.5)


def replace(net: Renewing) -> None:
    net.scale = net.scale * 0.5


@torch.no_grad()
def write_parameter(net: Renewing) -> None:
    net.gain.mul_(0.5)


@torch.no_grad()
def write_weight(net: Renewing) -> None:
    net.get_parameter("layers.0.weight").mul_(0.5)


def trained(before: Renewal, after: Renewal, schedule: str | None, is_static: bool = True) -> list[Tensor]:
    """Return parameters and buffers after two steps of four microbatches; on one device if `schedule` is None."""
    torch.manual_seed(0)
    net, x = Renewing(before, after), torch.linspace(-1, 1, 24).reshape(8, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    if schedule is None:
        for _ in range(2):
            for part in x.chunk(4):
                (net(part) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [t.detach() for t in net.state_dict().values()]
    mesh = mw.ProcessMesh([0, 1], ["pp"])
    mw.split_pipeline(net, mesh, at=["layers.2"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    options = {"enable": True, "accumulate_steps": 4, "schedule_mode": schedule}
    static = mw.to_static(net, None, None, optimizer, mw.Strategy.of(pipeline=options))
    eager = mw.microbatched(net, None, mesh, 4, schedule)
    for _ in range(2):
        if is_static:
            static(x)
            continue
        eager(x)
        optimizer.step()
        optimizer.zero_grad()
    return [mw.unshard_dtensor(t.detach()) for t in net.state_dict().values()]


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
@pytest.mark.parametrize(
    ("before", "after"), [(write, nothing), (nothing, replace), (write_parameter, nothing), (write_weight, nothing)]
)
def test_numbers_are_those_of_one_device(before: Renewal, after: Renewal, schedule: str) -> None:
    wanted = trained(before, after, None)
    for found in mw.simulate(lambda: trained(before, after, schedule), 2):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("before", "after"), [(write, nothing), (nothing, replace)])
def test_eager_numbers_are_those_of_one_device(before: Renewal, after: Renewal) -> None:
    wanted = trained(before, after, None)
    for found in mw.simulate(lambda: trained(before, after, "1F1B", is_static=False), 2):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_parameter_that_a_later_forward_pass_writes_to_is_refused_in_the_eager_mode() -> None:
    with pytest.raises(StageError, match="to_static"):
        mw.simulate(lambda: trained(write_weight, nothing, "GPipe", is_static=False), 2)
