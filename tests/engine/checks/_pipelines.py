"""Pipelines on two ranks, whose gradients are checked before updates."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import NonFiniteGradientError

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
}
CASES = [*(("1F1B", name) for name in OPTIMIZERS), ("ZB-H1", "AdamW")]
STEPS = 3


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 1))


def batch(at: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(at))


def one_device(name: str) -> list[float]:
    """Return the losses of one device, whose batch norm gets the same microbatches."""
    net = model()
    optimizer, losses = OPTIMIZERS[name](net.parameters()), list[float]()
    for at in range(STEPS):
        optimizer.zero_grad()
        parts = [nn.functional.mse_loss(net(x), x[:, :1]) / 4 for x in batch(at).chunk(4)]
        sum(parts, torch.zeros(())).backward()
        optimizer.step()
        losses.append(sum(part.item() for part in parts))
    return losses


def run(schedule: str, name: str) -> dict[str, Any]:
    """Return the results of right steps, of one with a bad number that is skipped, and of one that stops."""
    net = model()
    mw.split_pipeline(net, mw.ProcessMesh([0, 1], ["pp"]), at=["3"])
    optimizer = OPTIMIZERS[name](net.parameters())
    options = {"enable": True, "schedule_mode": schedule, "accumulate_steps": 4}
    step = mw.to_static(net, None, nn.functional.mse_loss, optimizer, mw.Strategy.of(pipeline=options))
    losses = [step(batch(0), batch(0)[:, :1]).item()]
    bad = batch(0)
    bad[3, 0] = float("nan")
    before = _kept(net)
    mw.check_steps("skip")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step(bad, batch(0)[:, :1])
    left_out = before == _kept(net) and any("is skipped" in str(each.message) for each in told)
    mw.check_steps("stop")
    try:
        step(bad, batch(0)[:, :1])
        error = ""
    except NonFiniteGradientError as found:
        error = str(found)
    stopped = before == _kept(net)
    losses += [step(batch(at), batch(at)[:, :1]).item() for at in range(1, STEPS)]
    return {"losses": losses, "right": one_device(name), "left out": left_out, "error": error, "stopped": stopped}


def _kept(net: nn.Module) -> list[Any]:
    return [x.tolist() for x in map(_local, net.state_dict().values())]


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, mw.DistTensor) else x


def results() -> dict[str, Any]:
    """Return the results of each schedule and optimizer."""
    found = {f"{schedule} {name}": run(schedule, name) for schedule, name in CASES}
    mw.check_steps()
    return found
