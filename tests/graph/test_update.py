"""The recorded update of an optimizer: repeated for parameters of one kind, with states before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from hashlib import sha256
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.graph import Program, capture, map_values, name_of, record_update
from meshwright.graph.update import optimizer_update
from meshwright.graph.update.known_steps import KNOWN_STEPS
from meshwright.spmd.rules.rule_table import RULES

_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {})
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
_CASES = _OPTIMIZERS | {
    "SGD with momentum": ("SGD", {"momentum": 0.9}),
    "SGD with Nesterov's momentum": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    "SGD with dampening": ("SGD", {"momentum": 0.9, "dampening": 0.3}),
    "Adam with amsgrad": ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    "Adagrad from 0.5": ("Adagrad", {"initial_accumulator_value": 0.5}),
    "RMSprop centered": ("RMSprop", {"centered": True, "momentum": 0.5}),
}
REFUSED = {"LBFGS", "SparseAdam", "RAdam", "ASGD", "Rprop"}
"""Optimizers whose step reads tensor values, or needs sparse gradients; Rprop has states that depend on the rate."""
OTHERWISE_FIRST = {"SGD", "SGD with dampening"}
"""Optimizers without states, or with states whose first value is no number."""


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(5))
        self.last = nn.Linear(4, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


Change = Callable[[Any, pytest.MonkeyPatch], None]
"""Change of an optimizer or of torch before a recording."""


def _update_of(name: str, repeats: bool, monkeypatch: pytest.MonkeyPatch, change: Change = lambda *_: None) -> Program:
    kind, options = _CASES[name]
    net = _Net()
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.1, **options)
    captured = capture(net, lambda x: net(x).sum(), [torch.ones(2, 4)])
    trained = [i for i in captured.program.inputs if i.role == "parameter"]
    names = {id(slot.tensor): slot.name for slot in captured.slots}
    with monkeypatch.context() as patch:
        if not repeats:
            patch.setattr(optimizer_update, "repeated", lambda *_: None)
        change(optimizer, patch)
        return record_update(optimizer, names, trained, {}, 0, 1)


@pytest.mark.parametrize("name", sorted(_CASES.keys() - REFUSED))
def test_a_repeated_update_equals_that_of_all_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, repeated = (_update_of(name, repeats, monkeypatch) for repeats in (False, True))
    assert _written(repeated) == _written(whole)
    assert _tensor_operators(repeated) == _tensor_operators(whole)
    assert [(i.role, i.name, i.first) for i in repeated.inputs if i.role != "constant"] == [
        (i.role, i.name, i.first) for i in whole.inputs if i.role != "constant"
    ]


def test_an_equal_step_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    KNOWN_STEPS.clear()
    first = _update_of("NAdam", True, monkeypatch)
    known = list(KNOWN_STEPS)
    again = _update_of("NAdam", True, monkeypatch)
    assert list(KNOWN_STEPS) == known
    assert str(again) == str(first)
    constants = [[id(i.source) for i in found.inputs if i.role == "constant"] for found in (first, again)]
    assert set(constants[0]).isdisjoint(constants[1])
    _update_of("Adam", True, monkeypatch)
    assert len(KNOWN_STEPS) > len(known)


def _replaced_function(optimizer: Any, patch: pytest.MonkeyPatch) -> None:
    adagrad: Any = import_module("torch.optim.adagrad")
    plain = adagrad._single_tensor_adagrad

    def decayed(params: list[torch.Tensor], *rest: Any, **options: Any) -> None:
        for p in params:
            p.mul_(0.5)
        plain(params, *rest, **options)

    patch.setattr(adagrad, "_single_tensor_adagrad", decayed)


CHANGES: dict[str, Change] = {
    "a default that the step reads": lambda optimizer, _: optimizer.defaults.update(initial_accumulator_value=0.5),
    "a function of the module": _replaced_function,
    "a method of tensors": lambda _, patch: patch.setattr(torch.Tensor, "addcdiv_", torch.Tensor.addcmul_),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_step_is_recorded_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(change: Change = lambda *_: None) -> Any:
        found = _update_of("Adagrad", True, monkeypatch, change)
        return _written(found), [(i.name, i.first) for i in found.inputs if i.role != "constant"]

    KNOWN_STEPS.clear()
    expected = recorded(CHANGES[name])
    KNOWN_STEPS.clear()
    unchanged = recorded()
    assert recorded(CHANGES[name]) == expected != unchanged
    assert recorded() == unchanged


def test_a_registered_rule_discards_recorded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    _update_of("SGD", True, monkeypatch)
    assert KNOWN_STEPS
    mw.register_rule("aten.mm", RULES["aten.mm"])
    assert not KNOWN_STEPS


@pytest.mark.parametrize("name", sorted(_CASES.keys() - REFUSED))
def test_states_are_inputs_of_the_first_step_if_a_number_fills_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _update_of(name, True, monkeypatch)
    states = [i for i in found.inputs if i.role == "state"]
    assert (not states) == (name in OTHERWISE_FIRST)
    assert all(i.first is not None for i in states)


@pytest.mark.parametrize("name", sorted(_CASES.keys() - REFUSED))
def test_steps_from_the_first_on_give_the_numbers_of_eager_steps(name: str) -> None:
    kind, options = _CASES[name]

    def steps(static: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = _Net()
        optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.05, **options)
        x = torch.arange(8.0).reshape(2, 4) / 8
        step = mw.to_static(net, None, lambda y, t: (y - t).square().mean(), optimizer)
        for _ in range(3):
            if static:
                step(x, torch.ones(2, 3))
            else:
                optimizer.zero_grad()
                (net(x) - torch.ones(2, 3)).square().mean().backward()
                optimizer.step()
        assert not static or step.recordings == (2 if name == "SGD with dampening" else 1)
        return [p.detach() for p in net.parameters()]

    (ours,) = mw.simulate(lambda: steps(True), 1)
    for one, other in zip(ours, steps(False), strict=True):
        torch.testing.assert_close(one, other)


def _written(program: Program) -> dict[str, Any]:
    """Return the values written to each input and the value of each new state, as expressions of inputs."""
    known: dict[Any, Any] = {}
    for i in program.inputs:
        known[i.value] = i.source.tolist() if isinstance(i.source, torch.Tensor) else (i.role, i.name)
    for node in program.nodes:
        args = repr(map_values(known.__getitem__, (node.args, dict(node.kwargs))))
        for at, v in enumerate(node.outs):
            known[v] = sha256(f"{name_of(node.op)} {args} {at}".encode()).hexdigest()
    names = {i.value: i.name for i in program.inputs}
    states = {".".join(key): known[v] for key, v in program.outputs["state"].items()}
    return {**{names[x]: known[v] for x, v in program.writes}, **states}


def _tensor_operators(program: Program) -> list[str]:
    """Return the operators on tensors, in order; operators on numbers may be shared."""
    return [name_of(node.op) for node in program.nodes if any(v.is_tensor for v in node.outs)]
