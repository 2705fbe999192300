"""Tensors of a model or of a batch that share memory: a static step that would lose a write is refused."""

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
    """A linear layer, and a buffer of two rows that the forward pass may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.base: Tensor
        self.other: Tensor
        self.register_buffer("base", torch.ones(2, 4))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.layer(x)


class TwoBuffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("other", self.base.view(8))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        self.other.add_(1)
        return self.layer(x) * self.base[0]


class RowOfABuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = self.base[0]

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        self.base[0].mul_(2)
        return self.layer(x) + self.other


class WrittenBatch(Net):
    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.layer(x) + sum(others)


class TiedByData(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(4, 4)
        self.second.weight.data = self.layer.weight.data

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.second(self.layer(x).tanh())


class OneRowEach(Net):
    """Two buffers in one memory with no common elements."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.ones(4, 4)
        self.base, self.other = memory[:, :2], memory[:, 2:]

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        self.base.add_(x[:, :2].detach().mean())
        return self.layer(x) * torch.cat([self.base, self.other], 1)[:1]


class ReadBeside(Net):
    """A buffer on the memory of a parameter; a step writes to the parameter at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("other", self.layer.weight.detach())

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight + 0.5 * self.other, self.layer.bias)


def _trained(kind: type[Net], static: bool, batch: Callable[[Tensor], tuple[Tensor, ...]]) -> list[float]:
    torch.manual_seed(0)
    net, x, y = kind(), torch.randn(4, 4), torch.randn(4, 4)
    step = step_of(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1), static=static)
    return [step(*batch(x), y).item() for _ in range(3)]


def _alone(x: Tensor) -> tuple[Tensor, ...]:
    return (x,)


def _twice(x: Tensor) -> tuple[Tensor, ...]:
    return x, x


def _with_a_part(x: Tensor) -> tuple[Tensor, ...]:
    return x, x[:, 1:2]


@pytest.mark.parametrize(
    ("kind", "batch", "found"),
    [
        (TwoBuffers, _alone, "buffer base and buffer other|buffer other and buffer base"),
        (RowOfABuffer, _alone, "buffer base and an attribute"),
        (WrittenBatch, _twice, "batch batch_0 and batch batch_1|batch batch_1 and batch batch_0"),
        (WrittenBatch, _with_a_part, "batch"),
        (TiedByData, _alone, "parameter"),
    ],
)
def test_shared_memory_that_is_written_is_refused(kind: type[Net], batch: Any, found: str) -> None:
    with pytest.raises(mw.errors.StaticError, match=f"({found}).*share memory"):
        mw.simulate(_trained, 1, kind, True, batch)


@pytest.mark.parametrize(
    ("kind", "batch"), [(WrittenBatch, _alone), (OneRowEach, _alone), (ReadBeside, _alone), (Net, _twice)]
)
def test_other_shared_memory_has_the_numbers_of_one_device(kind: type[Net], batch: Any) -> None:
    wanted = _trained(kind, False, batch)
    torch.testing.assert_close(mw.simulate(_trained, 1, kind, True, batch), [wanted], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiler", ["none", "inductor"])
def test_a_tie_between_steps_is_refused(compiler: Any) -> None:
    def go() -> None:
        net, x, y = TiedByData(), torch.randn(4, 4), torch.randn(4, 4)
        net.second.weight.data = net.second.weight.data.clone()
        optimizer, strategy = torch.optim.SGD(net.parameters(), lr=0.1), mw.Strategy(compiler=compiler)
        step = mw.to_static(net, None, F.mse_loss, optimizer, strategy)
        step(x, y)
        net.second.weight.data = net.layer.weight.data
        step(x, y)

    with pytest.raises(mw.errors.StaticError, match="share memory"):
        mw.simulate(go, 1)
