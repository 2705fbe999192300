"""Plans and conversions that are kept: only what is the same is used again."""

from __future__ import annotations

import torch
from torch import Tensor

import meshwright as mw

MESH = mw.ProcessMesh([0, 1], ["a"])


def test_a_float_that_decides_the_rule_makes_another_plan() -> None:
    plain = torch.tensor([3.0, 0.0, 4.0, 0.0])

    def on_rank() -> list[float]:
        x = mw.shard_tensor(plain, MESH, [mw.Shard(0)])
        return [torch.linalg.vector_norm(x, p).item() for p in (0.0, 2.0, 1.0)]

    assert mw.simulate(on_rank, 2) == [[2.0, 5.0, 7.0]] * 2


def test_a_tensor_that_wants_a_gradient_later_gets_it() -> None:
    def on_rank() -> Tensor:
        x = mw.shard_tensor(torch.ones(4), MESH, [])
        w = mw.shard_tensor(torch.arange(4.0), MESH, [mw.Shard(0)])
        (x * w).sum()
        x.requires_grad_()
        (x * w).sum().backward()
        return mw.unshard_dtensor(x.grad)

    assert all(g.tolist() == [0.0, 1.0, 2.0, 3.0] for g in mw.simulate(on_rank, 2))


def test_what_is_written_through_data_is_read() -> None:
    def on_rank() -> list[float]:
        w = mw.shard_tensor(torch.nn.Parameter(torch.ones(4)), MESH, [mw.Shard(0)])
        found: list[float] = []
        with torch.no_grad():
            for _ in range(2):
                found.append((w.cumsum(0) * 1).sum().item())
                w.data.mul_(2)
        return found

    assert mw.simulate(on_rank, 2) == [[10.0, 20.0]] * 2
