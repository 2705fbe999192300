"""Plans are made once: a step like the one before makes none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.tensor.core.dist_tensor import PLANS

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_third_step_makes_no_plan(name: str) -> None:
    """Optimizers divide by other numbers in every step."""

    def go() -> tuple[int, int]:
        mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
        net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
        optimizer = OPTIMIZERS[name](net.parameters())
        plan = {"0": mw.ColwiseParallel(), "3": mw.RowwiseParallel()}
        mw.parallelize(net, optimizer, mesh, mw.Parallelism(plan))
        counts: list[int] = []
        for _ in range(5):
            nn.functional.cross_entropy(net(torch.randn(4, 8)), torch.tensor([0, 1, 2, 3])).backward()
            mw.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(PLANS))
        return counts[2], counts[-1]

    for before, behind in mw.simulate(go, 4):
        assert before == behind
