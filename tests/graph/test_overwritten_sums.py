"""All-reduces overwrite only operands that are not read again: node by node and in kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw


class ReadTwice(nn.Module):
    """A sum over ranks whose operand is read before and after it, directly and through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.outer(self.inner(x).relu())
        folded = h.view(-1, 2, 4)
        return ((h.sin() + folded.flatten(1) - y) ** 2).mean() + (h + h).amax() + folded.mean()


def cut(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
    if isinstance(layer, nn.Linear):
        placements = [mw.Replicate(), mw.Shard(0 if name.endswith("inner") else 1)]
        layer.weight = mw.shard_tensor(layer.weight, mesh, placements)


def trained(compiler: str, mesh: mw.ProcessMesh) -> list[Tensor]:
    """Return the losses of three steps and the parameters after them; those of eager mode if `compiler` is empty."""
    torch.manual_seed(0)
    model = ReadTwice()
    mw.shard_layer(model, mesh, cut)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mw.to_static(model, None, None, optimizer, mw.Strategy(compiler=compiler)) if compiler else None
    losses: list[Tensor] = []
    for n in range(3):
        generator = torch.Generator().manual_seed(n)
        drawn = torch.randn(2, 4, 8, generator=generator).unbind()
        batch = [mw.shard_tensor(x, mesh, [mw.Shard(0), mw.Replicate()]) for x in drawn]
        loss = model(*batch) if step is None else step(*batch)
        if step is None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(torch.tensor(loss.item()))
    return [*losses, *(mw.unshard_dtensor(p).detach() for p in model.parameters())]


@pytest.mark.parametrize(("compiler", "ranks"), [("none", [[0, 1], [2, 3]]), ("inductor", [[0, 1]])])
def test_a_step_with_overwritten_sums_equals_eager_mode(compiler: str, ranks: list[list[int]]) -> None:
    """Kernels are compiled for each rank, so these have two only."""
    mesh = mw.ProcessMesh(ranks, dim_names=["dp", "tp"])
    found = mw.simulate(lambda: trained(compiler, mesh), mesh.size)
    expected = mw.simulate(lambda: trained("", mesh), mesh.size)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
