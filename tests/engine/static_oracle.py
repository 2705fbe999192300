"""One oracle for programs: a module trained as a program, eagerly on the same ranks, and on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw

from .oracle import STYLES, Style, compare, whole

Batch = Callable[[int], Any]


@dataclass(frozen=True)
class Job:
    """A module whose output is the loss, its batches, and its tolerances to one device and to eager mode."""

    module: Callable[[], nn.Module]
    batch: Batch
    close: float = 1e-5
    exact: bool = True


def numbers(seed: int, rows: int = 6) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed)),)


class Base(nn.Module):
    """Two linear layers with an operation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def between(self, x: Tensor) -> Tensor:
        return x.relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x))).square().mean()


def laid(module: nn.Module, style: Style) -> nn.Module:
    """Distribute matrices in the style's layout, and batches along the first axis."""

    def cut(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
        for key, value in list(layer.named_parameters(recurse=False)):
            if value.dim() == 2:
                setattr(layer, key, mw.shard_tensor(value, mesh, style.placements))

    def enter(inputs: Any, mesh: mw.ProcessMesh) -> Any:
        rows = [p if p == mw.Shard(0) else mw.Replicate() for p in style.placements]
        return tuple(mw.reshard(x, mesh, rows) if isinstance(x, Tensor) else x for x in inputs)

    return mw.shard_layer(module, style.mesh, cut, enter)


Make = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trained(work: Job, how: str, style: Style, make: Make = sgd, steps: int = 3) -> Any:
    """Return losses, parameters, buffers and states after some steps, and the next number of torch's generator."""
    torch.manual_seed(3)
    module = work.module()
    if how != "one device":
        module = laid(module, style)
    optimizer = make(module.parameters())
    step: Any = mw.to_static(module, None, None, optimizer) if how == "static" else eager(module, optimizer)
    losses = [step(*work.batch(seed)).detach() for seed in range(steps)]
    return whole([losses, dict(module.state_dict()), list(optimizer.state.values()), torch.rand(2)])


def eager(module: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> Any:
    def step(*batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()  # a static step refuses existing gradients
        return loss.detach()

    return step


def step_of(net: nn.Module, loss: Callable[..., Tensor], optimizer: torch.optim.Optimizer, static: bool) -> Any:
    """Return the training step for a batch and its labels, as a program or in eager mode."""
    if static:
        return mw.to_static(net, None, loss, optimizer)
    return eager(lambda *batch: loss(net(*batch[:-1]), batch[-1]), optimizer)


def check(work: Job, style: Style, make: Make = sgd) -> None:
    close = {"rtol": work.close * 10, "atol": work.close}
    wanted = trained(work, "one device", style, make)

    def go() -> None:
        found, same = trained(work, "static", style, make), trained(work, "eager", style, make)
        compare(found, wanted, close)
        compare(found, same, {"rtol": 0.0, "atol": 0.0} if work.exact else close)

    mw.simulate(go, style.ranks)


def same_as_eager(work: Job, style: Style = STYLES["rows"], make: Make = sgd, source: Any = "torch") -> None:
    def go() -> None:
        with mw.random_source(source):
            found, wanted = trained(work, "static", style, make), trained(work, "eager", style, make)
        compare(found, wanted, {"rtol": 0.0, "atol": 0.0})

    mw.simulate(go, style.ranks)


def normed(seed: int) -> tuple[Tensor, ...]:
    """Return a batch for BatchNorm."""
    return (torch.randn(6, 32, generator=torch.Generator().manual_seed(seed)),)


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.BatchNorm1d(16),
            nn.Linear(16, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.unflatten(1, (2, 4, 4))).logsumexp(1).mean()
