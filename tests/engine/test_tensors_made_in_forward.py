"""Tensors that a forward pass makes from numbers and writes to: each call makes new ones, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

from .static_oracle import step_of


def _sum_of_terms(net: Any, y: Tensor) -> Tensor:
    total = torch.tensor(0.0)
    for at in range(3):
        total += y[:, at].mean()
    return y * (1 + total)


def _items(net: Any, y: Tensor) -> Tensor:
    made = torch.tensor([1.0, 2.0, 3.0])
    made[0] = y.mean()
    made[1:] *= 2
    made.data.mul_(3)
    return y * made


def _of_numpy(net: Any, y: Tensor) -> Tensor:
    ones = torch.from_numpy(np.ones(3, dtype=np.float32))
    return y * (ones * 2).mul_(2) * torch.as_tensor([1.0, 2.0, 3.0]).add_(1) * torch.tensor(np.ones(3)).mul_(2).float()


def _asked(net: Any, y: Tensor) -> Tensor:
    made, whole = torch.tensor(1.0), torch.tensor([1, 2])
    made.mul_(2)
    made[...] = made * 3
    whole[0] = 5
    return y * made * whole[0] if made.item() > 5 else y


def _legacy(net: Any, y: Tensor) -> Tensor:
    return y * torch.FloatTensor([1.0, 2.0, 3.0]).mul_(2) * y.new_tensor([1.0, 2.0, 3.0]).add_(1)


def _copies(net: Any, y: Tensor) -> Tensor:
    return y * net.held.clone().mul_(2) * net.held.double().mul_(2).float()


def _shapes(net: Any, y: Tensor) -> Tensor:
    made = torch.eye(3)
    made[0, 1] = 2
    made.fill_diagonal_(4)
    steps = torch.arange(3.0)
    steps[1:].mul_(3)
    return y @ made + steps


ACTS = (_sum_of_terms, _items, _of_numpy, _asked, _legacy, _copies, _shapes)


class Net(nn.Module):
    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.held, self.act = nn.Linear(5, 3), torch.ones(3) * 2, act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, self.layer(x))


def _trained(act: Callable[[Any, Tensor], Tensor], mesh: mw.ProcessMesh | None) -> list[float]:
    torch.manual_seed(0)
    net = Net(act)
    x, y = torch.randn(8, 5), torch.randn(8, 3)
    if mesh is not None:
        mw.shard_layer(net, mesh)
        x, y = (mw.shard_tensor(t, mesh, [mw.Shard(0)]) for t in (x, y))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    step = step_of(net, F.mse_loss, optimizer, static=mesh is not None)
    found = [step(x, y).item() for _ in range(3)]
    return found


@pytest.mark.parametrize("act", ACTS)
def test_each_call_makes_new_tensors(act: Callable[[Any, Tensor], Tensor]) -> None:
    for found in mw.simulate(_trained, 2, act, mw.ProcessMesh([0, 1], ["dp"])):
        torch.testing.assert_close(found, _trained(act, None), rtol=1e-5, atol=1e-5)


HELD = np.ones(3, dtype=np.float32)


def _as_array(net: Any, y: Tensor) -> Tensor:
    return y * torch.from_numpy(HELD).add_(1)


def _as_tensor(net: Any, y: Tensor) -> Tensor:
    part = torch.as_tensor(HELD)[1:]
    part += y.mean()
    return y


def _as_buffer(net: Any, y: Tensor) -> Tensor:
    return y * torch.frombuffer(bytearray(12), dtype=torch.float32).add_(1)


def _as_capsule(net: Any, y: Tensor) -> Tensor:
    return y * torch.from_dlpack(HELD).add_(1)


@pytest.mark.parametrize(
    ("act", "found"),
    [
        (_as_array, "memory of a NumPy array"),
        (_as_tensor, "memory of a NumPy array"),
        (_as_buffer, r"it calls torch.frombuffer\(\)"),
        (_as_capsule, r"it calls torch._C._from_dlpack\(\)"),
    ],
)
def test_writes_to_memory_of_others_are_refused(act: Callable[[Any, Tensor], Tensor], found: str) -> None:
    with pytest.raises(mw.errors.CaptureError, match=found):
        mw.simulate(_trained, 2, act, mw.ProcessMesh([0, 1], ["dp"]))
    assert HELD.tolist() == [1, 1, 1]
