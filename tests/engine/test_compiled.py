"""Kernels of Inductor: the numbers of eager mode, and a program per size, up to the bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.engine import StaticError
from meshwright.graph import Start
from meshwright.passes import OverlapSchedule

SIZES = (6, 4, 6)


def trained(wrap: Callable[[nn.Module, torch.optim.Optimizer], Callable[[Tensor, Tensor], Tensor]]) -> list[float]:
    """Return the losses of a few steps, with batches of several sizes."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # other tests compile other optimizers
    step = wrap(model, optimizer)
    torch.manual_seed(5)
    batches = [(torch.randn(n, 8), torch.randint(4, (n,))) for n in SIZES]
    return [step(*batch).item() for batch in batches]


def eager(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def test_kernels_have_the_numbers_of_eager_mode_for_every_size() -> None:
    mw.simulate(compare, 1)


def compare() -> None:
    """Run the test on one rank."""
    made: list[mw.DistModel] = []

    def static(model: nn.Module, optimizer: torch.optim.Optimizer) -> mw.DistModel:
        strategy = mw.Strategy(compiler="inductor", max_programs=2)
        made.append(mw.to_static(model, None, F.cross_entropy, optimizer, strategy))
        return made[0]

    assert trained(static) == pytest.approx(trained(eager), rel=1e-5)
    assert made[0].recordings == 2
    with pytest.raises(StaticError, match="max_programs"):
        made[0](torch.randn(2, 8), torch.randint(4, (2,)))


def test_kernels_wait_for_conversions_that_start_early() -> None:
    def losses(strategy: mw.Strategy) -> list[float]:
        mesh = mw.ProcessMesh([0, 1], ["dp"])
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        step = mw.to_static(model, None, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
        x, labels = torch.randn(8, 8), torch.randint(4, (8,))
        batch = [mw.shard_tensor(t, mesh, [mw.Shard(0)]) for t in (x, labels)]
        found = [step(*batch).item() for _ in range(2)]
        assert any(isinstance(n.op, Start) for n in step.program.nodes) == bool(strategy.passes)
        return found

    plain, early = (
        mw.simulate(lambda s=s: losses(s), 2)
        for s in (mw.Strategy(), mw.Strategy(compiler="inductor", passes=(OverlapSchedule(),)))
    )
    assert early[0] == early[1]
    assert early[0] == pytest.approx(plain[0], rel=1e-6)
