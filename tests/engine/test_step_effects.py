"""Effects of an optimizer's step that are refused, because a program would have them only once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Optimizer

import meshwright as mw
from meshwright.errors import CaptureError, SideEffectError


class _Counting(SGD):
    k = 0

    def step(self, closure: Any = None) -> Any:
        self.k += 1
        return super().step(closure)


class _Decaying(SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.5
        return super().step(closure)


class _CountingInGroups(SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


class _Wrapper(Optimizer):
    def __init__(self, parameters: Any, lr: float) -> None:
        self.base = SGD(parameters, lr=lr, momentum=0.9)
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.base.step()


class _StateOfAll(SGD):
    def step(self, closure: Any = None) -> Any:
        states: Any = self.state
        states["all"]["sum"] = torch.ones(2)
        return super().step(closure)


def _with_list(parameters: Any, lr: float) -> SGD:
    optimizer, calls = SGD(parameters, lr=lr), list[int]()
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    return optimizer


def _with_schedule(parameters: Any, lr: float) -> SGD:
    optimizer = SGD(parameters, lr=lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


def _reading_a_state(parameters: Any, lr: float) -> torch.optim.Adam:
    parameters = list(parameters)
    optimizer = torch.optim.Adam(parameters, lr=lr)
    optimizer.register_step_pre_hook(lambda o, *_: o.state[parameters[0]]["exp_avg"].zero_())
    return optimizer


def _one_step(make: Callable[..., Optimizer]) -> None:
    net = nn.Linear(4, 2)
    model = mw.to_static(net, None, F.mse_loss, make(net.parameters(), lr=0.1))
    model(torch.ones(2, 4), torch.zeros(2, 2))


@pytest.mark.filterwarnings("ignore:Detected call")
@pytest.mark.parametrize("make", [_Counting, _Decaying, _CountingInGroups, _with_list, _with_schedule])
def test_a_step_that_changes_more_than_tensors_is_refused(make: Callable[..., Optimizer]) -> None:
    with pytest.raises(SideEffectError, match=r"self\.state"):
        mw.simulate(_one_step, 1, make)


@pytest.mark.parametrize("make", [_Wrapper, _StateOfAll, _reading_a_state])
def test_a_step_on_other_states_is_refused(make: Callable[..., Optimizer]) -> None:
    with pytest.raises(CaptureError, match="recording"):
        mw.simulate(_one_step, 1, make)


def test_changes_of_a_refused_step_are_undone() -> None:
    calls = list[int]()

    def go() -> list[int]:
        net = nn.Linear(4, 2)
        optimizer = SGD(net.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: calls.append(1))
        model = mw.to_static(net, None, F.mse_loss, optimizer)
        with pytest.raises(SideEffectError):
            model(torch.ones(2, 4), torch.zeros(2, 2))
        return calls

    assert mw.simulate(go, 1) == [[]]


class _Scaled(SGD):
    """An optimizer that scales the rate of a parameter by its attribute and by its number in the group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for at, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.sub_(group["lr"] * (at + 1) * getattr(p, "scale", 1.0) * p.grad)


def _losses(static: bool, net: nn.Module, optimizer: Optimizer, before: Callable[[int], None]) -> list[float]:
    """Return the losses of four steps, static or eager; `before` is called before each."""
    step = mw.to_static(net, None, F.mse_loss, optimizer)
    x, y, found = torch.ones(2, 4), torch.zeros(2, 2), list[float]()
    for at in range(4):
        before(at)
        loss = step(x, y) if static else F.mse_loss(net(x), y)
        if not static:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append(loss.item())
    return found


def _check_equal(losses: Callable[[bool], list[float]]) -> None:
    static, eager = (mw.simulate(losses, 1, static)[0] for static in (True, False))
    assert static == pytest.approx(eager, rel=1e-5)


def test_a_step_uses_attributes_and_numbers_of_parameters() -> None:
    def losses(static: bool) -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        net[0].bias.requires_grad_(False)
        weight: Any = net[1].weight
        weight.scale = 3.0
        return _losses(static, net, _Scaled(net.parameters(), lr=0.05), lambda at: None)

    _check_equal(losses)


def test_a_changed_element_of_an_option_is_recorded_again() -> None:
    def losses(static: bool) -> list[float]:
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        betas = optimizer.param_groups[0]["betas"] = [0.9, 0.99]

        def change(at: int) -> None:
            betas[0] = 0.9 - 0.2 * (at // 2)

        return _losses(static, net, optimizer, change)

    _check_equal(losses)


def test_a_replaced_parameter_that_the_optimizer_lacks_is_an_error() -> None:
    def go() -> None:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        step = mw.to_static(net, None, F.mse_loss, torch.optim.Adam(net.parameters(), lr=0.1))
        step(torch.ones(2, 4), torch.zeros(2, 2))
        net[1] = nn.Linear(4, 2)
        step(torch.ones(2, 4), torch.zeros(2, 2))

    with pytest.raises(CaptureError, match="the model lacks"):
        mw.simulate(go, 1)
