"""Writes through `.data` after an operator that saved the tensor: refused if a gradient would differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

from .static_oracle import step_of


class Net(nn.Module):
    """Two linear layers; `between` may write to a parameter, a buffer, an attribute or a value."""

    gate: Tensor
    between: Any

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("gate", torch.ones(4))
        self.held = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self.a(x))


class Parameter(Net):
    def between(self, x: Tensor) -> Tensor:
        out = self.b(x)
        self.b.weight.data.mul_(0.5)
        return out


class RowOfAParameter(Net):
    def between(self, x: Tensor) -> Tensor:
        out = x @ self.b.weight.t()
        self.b.weight.detach()[0].zero_()
        return out


class Buffer(Net):
    def between(self, x: Tensor) -> Tensor:
        out = x * self.gate
        self.gate.data.mul_(0.5)
        return out


class Attribute(Net):
    def between(self, x: Tensor) -> Tensor:
        out = x * self.held
        self.held.data.mul_(0.5)
        return out


class Activation(Net):
    def between(self, x: Tensor) -> Tensor:
        out = x * x.cos()
        x.data.mul_(0.5)
        return out


class Result(Net):
    def between(self, x: Tensor) -> Tensor:
        out = x.tanh()
        out.data.mul_(0.5)
        return out


@pytest.mark.parametrize("kind", [Parameter, RowOfAParameter, Buffer, Attribute, Activation, Result])
def test_a_write_to_a_saved_tensor_is_refused(kind: type[Net]) -> None:
    with pytest.raises(mw.errors.CaptureError, match=r"a write through .data or detach\(\)"):
        mw.simulate(_trained, 1, kind, True)


class Before(Net):
    def between(self, x: Tensor) -> Tensor:
        self.b.weight.data.mul_(0.5)
        return self.b(x)


class Unread(Net):
    """A model whose backward pass reads no operand: an addition needs none, and an argmax has no backward pass."""

    def between(self, x: Tensor) -> Tensor:
        out = x + self.gate + (x @ self.b.weight).argmax(-1, keepdim=True)
        self.gate.data.mul_(0.5)
        self.b.weight.data.mul_(0.5)
        return out


@pytest.mark.parametrize("kind", [Before, Unread])
def test_other_writes_have_the_numbers_of_one_device(kind: type[Net]) -> None:
    torch.testing.assert_close(mw.simulate(_trained, 1, kind, True), [_trained(kind, False)], rtol=1e-5, atol=1e-6)


def _trained(kind: type[Net], static: bool) -> list[float]:
    torch.manual_seed(0)
    net, x, y = kind(), torch.randn(4, 4), torch.randn(4, 4)
    step = step_of(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1), static=static)
    return [step(x, y).item() for _ in range(3)]


class Assigned(Net):
    def between(self, x: Tensor) -> Tensor:
        self.gate.data = self.gate.data * 0.9 + x.detach().mean(0) * 0.1
        return x * self.gate


def test_the_error_of_an_assignment_to_data_gives_the_remedy() -> None:
    with pytest.raises(mw.errors.CaptureError, match=r"an assignment x.data = y(.|\n)*x.copy_\(y\)"):
        mw.simulate(_trained, 1, Assigned, True)
