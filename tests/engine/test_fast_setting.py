"""A setting that was compared before finds every later change of tensors, hooks, tables, and options."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.engine.recording.setting import Roots, Setting

Change = Callable[[nn.Linear, torch.optim.Optimizer], Any]


def _reorder(layer: nn.Linear, _: object) -> None:
    layer._parameters["weight"] = layer._parameters.pop("weight")


def _set_data(x: Tensor | None, data: Tensor) -> None:
    assert x is not None
    x.data = data


def _set_flag(value: bool) -> None:
    """Set a flag of a backend as torch's own tests do; they forbid assignments to it."""
    torch.backends.mkldnn.set_flags(_deterministic=value)


CHANGES: dict[str, Change] = {
    "gradients": lambda layer, _: layer.weight.requires_grad_(False),
    "sizes": lambda layer, _: _set_data(layer.weight, torch.zeros(2, 8)),
    "dtype": lambda layer, _: _set_data(layer.weight, torch.zeros(4, 4, dtype=torch.float64)),
    "sizes of a buffer": lambda layer, _: _set_data(layer.get_buffer("table"), torch.zeros(2, 3)),
    "parameter": lambda layer, _: setattr(layer, "weight", nn.Parameter(torch.zeros(4, 4))),
    "no parameter": lambda layer, _: setattr(layer, "bias", None),
    "order of parameters": _reorder,
    "buffer": lambda layer, _: layer.register_buffer("other", torch.zeros(2)),
    "hook of a parameter": lambda layer, _: layer.weight.register_hook(lambda grad: grad),
    "hook after accumulation": lambda layer, _: layer.weight.register_post_accumulate_grad_hook(lambda p: None),
    "hook of a layer": lambda layer, _: layer.register_forward_hook(lambda *_: None),
    "mode": lambda layer, _: layer.eval(),
    "module": lambda layer, _: layer.add_module("inner", nn.ReLU()),
    "class": lambda layer, _: setattr(layer, "__class__", nn.Module),
    "tensor as an option": lambda _, optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.1)),
    "group": lambda layer, optimizer: optimizer.param_groups[0]["params"].pop(),
    "sizes of a state": lambda layer, optimizer: _set_data(optimizer.state[layer.weight]["exp_avg"], torch.zeros(2, 8)),
    "state": lambda layer, optimizer: optimizer.state[layer.weight].update(extra=torch.zeros(1)),
    "type of a state": lambda layer, optimizer: optimizer.state[layer.weight].update(step=1.0),
    "states": lambda _, optimizer: optimizer.state.clear(),
    "hook of a step": lambda _, optimizer: optimizer.register_step_pre_hook(lambda *_: None),
    "grad mode": lambda *_: torch.set_grad_enabled(False),
    "default dtype": lambda *_: torch.set_default_dtype(torch.float64),
    "default device": lambda *_: torch.set_default_device("meta"),
    "flag": lambda *_: _set_flag(not torch.backends.mkldnn.deterministic),
}


@pytest.fixture(autouse=True)
def restored_state() -> Any:
    """Restore the state of torch that a change has set."""
    flag = torch.backends.mkldnn.deterministic
    yield
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    _set_flag(flag)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_a_comparison_is_found(change: str) -> None:
    layer = nn.Linear(4, 4)
    layer.register_buffer("table", torch.zeros(3))
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.zeros(1, 4)).sum().backward()
    optimizer.step()
    captured: Any = SimpleNamespace(places=None, ran=None)
    setting = Setting.of(Roots(layer, (), optimizer), captured)
    assert setting.holds()
    assert setting.holds()
    assert setting._fast is not None
    assert setting._fast.holds()
    CHANGES[change](layer, optimizer)
    assert not setting.holds()


def test_equal_states_of_other_tensors_are_no_change() -> None:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.zeros(1, 4)).sum().backward()
    optimizer.step()
    captured: Any = SimpleNamespace(places=None, ran=None)
    setting = Setting.of(Roots(layer, (), optimizer), captured)
    assert setting.holds()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.5
    layer.weight.register_hook(lambda grad: grad).remove()
    assert setting.holds()


def test_a_setting_is_compared_once_where_the_caller_says_that_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Setting] = []
    holds = Setting.holds
    monkeypatch.setattr(Setting, "holds", lambda setting: compared.append(setting) or holds(setting))

    def go() -> list[int]:
        layer, counts = nn.Linear(4, 4), []
        model, x = mw.to_static(layer), torch.ones(2, 4)
        model(x)
        with model.unchanged():
            for _ in range(3):
                before = len(compared)
                model(x)
                counts.append(len(compared) - before)
        layer.register_buffer("other", torch.zeros(1))
        model(x)
        assert model.recordings == 2
        return counts

    assert mw.simulate(go, 1) == [[1, 0, 0]]
