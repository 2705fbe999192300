"""Inputs of a pipeline's step that are on the ranks of several stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import StageError

BOTH, FIRST, LAST = mw.ProcessMesh([0, 1], ["x"]), mw.ProcessMesh([0], ["dp"]), mw.ProcessMesh([1], ["dp"])


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(mw.reshard(x, FIRST, [])).tanh()
        x, mask = mw.reshard(x, LAST, []), mw.reshard(mask, LAST, [])
        return (self.last(x) * mask).square().mean()


def test_an_input_on_the_ranks_of_several_stages_is_refused() -> None:
    def go() -> None:
        net = _Masked()
        mask = mw.shard_tensor(torch.ones(4, 4), BOTH, [mw.Shard(1)])
        how = mw.Strategy.of(pipeline={"enable": True, "accumulate_steps": 2, "schedule_mode": "1F1B"})
        mw.to_static(net, None, None, torch.optim.SGD(net.parameters(), 0.1), how)(torch.ones(4, 4), mask)

    with pytest.raises(StageError, match="batch_1 on ranks of the stages 0 and 1"):
        mw.simulate(go, 2)
