"""A program runs even if a kernel returns another memory order than torch predicted during recording."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw


class Turned(nn.Module):
    """A layer along the second dim: the gradient of its result has another memory order than the result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor, scale: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.layer(x).transpose(1, 2) * scale, target)


def test_a_gradient_in_another_memory_order_is_viewed() -> None:
    torch.manual_seed(0)
    model, batch = Turned(), (torch.randn(4, 2, 5), torch.rand(4, 1, 2), torch.randn(4, 3, 2))
    model(*batch).backward()
    wanted = [p.grad for p in model.parameters()]

    def on_rank() -> list[Tensor]:
        torch.manual_seed(0)
        mesh = mw.ProcessMesh([0, 1], ["dp"])
        part = mw.shard_layer(Turned(), mesh)
        before = [mw.unshard_dtensor(p).detach().clone() for p in part.parameters()]
        static = mw.to_static(part, None, None, torch.optim.SGD(part.parameters(), lr=1.0))
        static(*[mw.shard_tensor(x, mesh, [mw.Shard(0)]) for x in batch])
        return [x - mw.unshard_dtensor(p).detach() for x, p in zip(before, part.parameters(), strict=True)]

    for found in mw.simulate(on_rank, 2):
        torch.testing.assert_close(found, wanted)
