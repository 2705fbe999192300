"""States that a checkpoint restores are on the devices on which each optimizer of torch makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import meshwright as mw
from tests.device.inspection import Devices

Build = Callable[[Any], Optimizer]
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"fused": True}, {"capturable": True}, {"foreach": True}, {"momentum": 0.9})
LEFT_OUT = {"LBFGS", "Muon", "Optimizer", "SparseAdam"}
"""Muon refuses parameters that are no matrices; the states of LBFGS are lists; SparseAdam needs sparse gradients."""
COUNTERS = {"mu_product", "step"}


def optimizers() -> Iterator[tuple[str, Build]]:
    """Yield each optimizer of torch with each option that it has."""
    for name, found in sorted(vars(torch.optim).items()):
        if not isinstance(found, type) or not issubclass(found, Optimizer) or name in LEFT_OUT:
            continue
        kind: Any = found
        defaults = kind([nn.Parameter(torch.zeros(1))], lr=0.1).defaults
        for options in OPTIONS:
            if options.keys() <= defaults.keys():
                yield f"{name} {options}", lambda params, k=kind, o=options: k(params, lr=0.1, **o)


CASES = dict(optimizers())


class Scaled(nn.Module):
    """A linear layer with a scale, which is a parameter of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def built(make: Build, mesh: mw.ProcessMesh | None) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Scaled().to("mesh:0")
    if mesh is not None:
        mw.shard_layer(model, mesh)
    optimizer = make(model.parameters())
    return model, optimizer if mesh is None else mw.shard_optimizer(optimizer)


def step(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Make a training step, and return the parameters."""
    model(torch.linspace(-1, 1, 8).view(2, 4).to("mesh:0")).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return [whole(p.detach()).cpu().tolist() for p in model.parameters()]


def whole(x: Tensor) -> Tensor:
    return mw.unshard_dtensor(x) if isinstance(x, mw.DistTensor) else x


def devices(optimizer: Optimizer) -> list[tuple[str, torch.device]]:
    return [(key, x.device) for state in optimizer.state.values() for key, x in sorted(state.items())]


def counters(optimizer: Optimizer) -> list[tuple[str, type[Tensor]]]:
    """Return the type of each counter."""
    return [(key, type(x)) for state in optimizer.state.values() for key, x in state.items() if key in COUNTERS]


@pytest.mark.parametrize("case", CASES)
def test_restored_states_are_those_that_the_optimizer_makes(case: str, mesh_device: Devices, tmp_path: Path) -> None:
    first, again = (built(CASES[case], None) for _ in range(2))
    step(*first)
    mw.save_checkpoint(tmp_path, 1, *first)
    mw.load_checkpoint(tmp_path, *again)
    assert devices(again[1]) == devices(first[1])
    assert step(*again) == step(*first)


@pytest.mark.parametrize("case", [case for case in CASES if "{}" in case])
def test_counters_beside_a_parameter_of_one_number_are_plain(case: str, mesh_device: Devices, tmp_path: Path) -> None:
    def run() -> None:
        first, again = (built(CASES[case], mw.ProcessMesh([0], ["dp"])) for _ in range(2))
        step(*first)
        mw.save_checkpoint(tmp_path, 1, *first)
        mw.load_checkpoint(tmp_path, *again)
        assert counters(again[1]) == counters(first[1])
        assert devices(again[1]) == devices(first[1])
        assert step(*again) == step(*first)

    mw.simulate(run, 1)


@pytest.mark.parametrize(("saved", "options"), [(None, True), (True, None), (False, True), (True, False)])
def test_an_optimizer_keeps_its_choice_of_kernels(
    saved: bool | None, options: bool | None, mesh_device: Devices, tmp_path: Path
) -> None:
    first, again = (built(lambda p, f=f: torch.optim.AdamW(p, lr=0.1, fused=f), None) for f in (saved, options))
    step(*first)
    mw.save_checkpoint(tmp_path, 1, *first)
    mw.load_checkpoint(tmp_path, *again)
    assert again[1].param_groups[0]["fused"] is options
    expected = torch.device("mesh:0" if options else "cpu")
    assert {device for key, device in devices(again[1]) if key == "step"} == {expected}
    step(*again)
