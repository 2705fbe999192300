"""Static steps in two parts: every gradient is checked before the update, and the numbers are those of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.engine.checks import static_checks as static
from meshwright.engine.static import program_builder as builder
from meshwright.errors import CaptureError

LEFT_OUT = {"LBFGS", "SparseAdam", "Muon"}
"""Optimizers that need a closure, sparse gradients, or matrices."""
REFUSED = {"ASGD", "RAdam"}
"""Optimizers with a branch in Python on the step number, which static mode refuses."""
MAKERS = {
    name: found
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and name not in {"Optimizer", *LEFT_OUT}
}
OPTIONS: Sequence[Mapping[str, Any]] = ({}, {"foreach": True}, {"foreach": False})
STEPS = 3


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 3, generator=generator)


def _clip(optimizer: torch.optim.Optimizer) -> None:
    def clip(optimizer: torch.optim.Optimizer, *_: object) -> None:
        torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.1)

    optimizer.register_step_pre_hook(clip)


def _one_device(make: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any], clip: bool) -> list[Tensor]:
    net, (x, y) = _model(), _batch()
    optimizer = make(net.parameters(), **options)
    if clip:
        _clip(optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def _static(make: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any], clip: bool) -> list[Tensor]:
    mesh, net = mw.init_mesh(dp=2), _model()
    mw.shard_layer(net, mesh)
    optimizer = make(net.parameters(), **options)
    if clip:
        _clip(optimizer)
    step = mw.to_static(net, None, nn.functional.mse_loss, optimizer)
    batch = [mw.shard_tensor(x, mesh, [mw.Shard(0)]) for x in _batch()]
    for _ in range(STEPS):
        step(*batch)
    return [mw.unshard_dtensor(p.detach()) for p in net.parameters()]


@pytest.fixture
def checked_gradients(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Return the names of the gradients checked in each step, on simulated ranks that compare their calls."""
    seen, leaves_out = list[set[str]](), static.should_skip_update

    def look(tensors: Mapping[str, Tensor], *more: Any) -> bool:
        seen.append({name.removeprefix("the gradient of ") for name in tensors})
        return leaves_out(tensors, *more)

    for module in (builder, static):
        monkeypatch.setattr(module, "is_compared", lambda: True)
    monkeypatch.setattr(static, "should_skip_update", look)
    return seen


CASES = [(name, options, False) for name in MAKERS for options in OPTIONS]
CASES += [(name, options, True) for name in ("SGD", "AdamW") for options in OPTIONS]


@pytest.mark.parametrize(("name", "options", "clip"), CASES, ids=str)
def test_every_gradient_of_every_step_is_checked(
    checked_gradients: list[set[str]], name: str, options: Mapping[str, Any], clip: bool
) -> None:
    if name in REFUSED:
        with pytest.raises(CaptureError):
            mw.simulate(lambda: _static(MAKERS[name], options, clip), 2)
        return
    right = copy.deepcopy(_one_device(MAKERS[name], options, clip))
    found = mw.simulate(lambda: _static(MAKERS[name], options, clip), 2)
    assert checked_gradients == [{"0.weight", "0.bias", "2.weight", "2.bias"}] * (2 * STEPS)
    for each in found:
        torch.testing.assert_close(each, right)
