"""States that an optimizer loads have the layouts of those that it makes: ZeRO saves memory after a resume too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.engine import ShardingStage1, ShardingStage2, ShardingStage3

Net = tuple[nn.Module, torch.optim.Optimizer]
STAGES: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda model: None,
    "ZeRO-1": lambda model: ShardingStage1("dp", least=4),
    "ZeRO-2": lambda model: ShardingStage2("dp", model, least=4),
    "ZeRO-3": lambda model: ShardingStage3("dp", model, least=4),
}


def built(stage: str, options: dict[str, bool]) -> Net:
    """Return a model of five by six weights and an optimizer, on two ranks."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5).to(torch.bfloat16 if options.get("master_weights") else torch.float32)
    mesh = mw.ProcessMesh([0, 1], ["dp"])
    mw.shard_layer(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, mw.shard_optimizer(optimizer, STAGES[stage](model), **options)


def step(net: Net) -> None:
    model, optimizer = net
    mesh = mw.ProcessMesh([0, 1], ["dp"])
    dtype = next(model.parameters()).dtype
    x = mw.shard_tensor(torch.linspace(-1, 1, 24).view(4, 6).to(dtype), mesh, [mw.Shard(0)])
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def held(net: Net) -> list[Any]:
    """Return the layout and the numbers of each state, and the parameters."""
    model, optimizer = net
    states = [
        (name, key, str(getattr(x, "placements", "")), whole(x).tolist())
        for name, p in model.named_parameters()
        for key, x in sorted(optimizer.state[p].items())
    ]
    return [*states, *(whole(p.detach()).tolist() for p in model.parameters())]


def whole(x: torch.Tensor) -> torch.Tensor:
    return mw.unshard_dtensor(x) if isinstance(x, mw.DistTensor) else x


def by_checkpoint(source: Net, target: Net, folder: Path) -> None:
    mw.save_checkpoint(folder, 1, *source)
    mw.load_checkpoint(folder, *target)


def by_state_dict(source: Net, target: Net, folder: Path) -> None:
    target[0].load_state_dict(source[0].state_dict())
    target[1].load_state_dict(copy.deepcopy(source[1].state_dict()))  # torch does not copy loaded states


def by_whole_states(source: Net, target: Net, folder: Path) -> None:
    """Load plain whole states, as another program or one device has saved them."""
    found = copy.deepcopy(source[1].state_dict())
    states = {at: {key: whole(x) for key, x in state.items()} for at, state in found["state"].items()}
    target[0].load_state_dict(source[0].state_dict())
    target[1].load_state_dict({**found, "state": states})


@pytest.mark.parametrize("options", [{}, {"master_weights": True}, {"offload": True}], ids=str)
@pytest.mark.parametrize("load", [by_checkpoint, by_state_dict, by_whole_states])
@pytest.mark.parametrize("stage", STAGES)
def test_layouts_and_bits_are_those_of_a_run_that_goes_on(
    stage: str, load: Callable[..., None], options: dict[str, bool], tmp_path: Path
) -> None:
    def run() -> None:
        source, target = built(stage, options), built(stage, options)
        step(source)
        load(source, target, tmp_path / "checkpoint")
        assert held(target) == held(source)
        step(source)
        step(target)
        assert held(target) == held(source)

    mw.simulate(run, 2)
