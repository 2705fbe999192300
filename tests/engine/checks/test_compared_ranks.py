"""Programs on simulated ranks whose calls are compared as between processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from tests.compared_ranks import compared
from tests.pipeline.test_autocast import llama, stepped
from tests.pipeline.test_layers import CASES, piped


@pytest.mark.parametrize(("names", "mode", "way", "microbatches", "replicas", "strategy"), CASES)
def test_static_pipelines(
    names: tuple[str, ...],
    mode: str,
    way: tuple[int, ...],
    microbatches: int,
    replicas: int,
    strategy: dict[str, Any],
) -> None:
    def program() -> list[Any]:
        return piped(names, mode, way, microbatches, replicas, **strategy)

    ranks = replicas * (max(way) + 1)
    expected = mw.simulate(program, ranks)
    with compared():
        found = mw.simulate(program, ranks)
    assert [losses for losses, *_ in found] == [losses for losses, *_ in expected]


def test_eager_pipelines_under_autocast() -> None:
    with compared():
        mw.simulate(lambda: stepped(llama((2, 2, 1)), torch.bfloat16), 4)


class Scaled(nn.Module):
    """A scalar of the last stage that the first stage uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.scale).square().mean()


def trained(mesh: mw.ProcessMesh | None) -> list[float]:
    torch.manual_seed(0)
    model = Scaled() if mesh is None else mw.split_pipeline(Scaled(), mesh, at=["last"])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses: list[float] = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_gradients_of_other_stages_are_not_checked() -> None:
    with compared():
        for found in mw.simulate(lambda: trained(mw.ProcessMesh([0, 1], ["pp"])), 2):
            assert found == pytest.approx(trained(None), rel=1e-5)
