"""Plain inputs of a parallel model must be the whole batch on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.engine import BatchError


def model() -> nn.Module:
    net, _ = mw.parallelize(nn.Linear(2, 2), None, mw.ProcessMesh([0, 1], ["dp"]), mw.Parallelism())
    return net


def test_inputs_that_differ_are_refused() -> None:
    with pytest.raises(BatchError, match="LOCAL_RANK"):
        mw.simulate(lambda: model()(torch.full((4, 2), float(mw.get_rank()))), 2)


def test_later_inputs_are_compared_again() -> None:
    def go() -> None:
        net = model()
        for call in range(1, 10):
            net(torch.full((4, 2), float(mw.get_rank() * (call > 4))))

    with pytest.raises(BatchError, match="call 8"):
        mw.simulate(go, 2)


def test_equal_inputs_and_distributed_ones_pass() -> None:
    def go() -> tuple[int, ...]:
        net = model()
        x = torch.ones(4, 2)
        part = mw.dtensor_from_local(torch.full((2, 2), float(mw.get_rank())), net.weight.mesh, [mw.Shard(0)])
        return (*net(x).shape, *net(part).shape)

    assert mw.simulate(go, 2) == [(4, 2, 4, 2)] * 2
