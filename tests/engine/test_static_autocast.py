"""A static program under `amp` equals torch's autocast, with the casts and dtypes of the model itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw


class Casts(nn.Module):
    """Norms and losses with casts as in typical models: to float32, and back to the input's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        dtype, wide = h.dtype, h.float()
        h = self.scale * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(dtype)
        logits = self.down(h).float()
        with torch.autocast("cpu", enabled=False):
            penalty = (self.down.weight @ self.down.weight.T).square().mean()
        return ((logits.logsumexp(-1) - (logits * y).sum(-1)).mean()) + 0.01 * penalty


def losses(static: bool, mesh: mw.ProcessMesh | None, dtype: torch.dtype) -> list[float]:
    torch.manual_seed(0)
    net = Casts()
    if mesh is not None:
        net.up.weight = mw.shard_tensor(net.up.weight, mesh, [mw.Replicate(), mw.Shard(0)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    x, y = torch.randn(6, 8) * 8, F.one_hot(torch.arange(6) % 4, 4).float()
    if static:
        model = mw.to_static(net, None, None, optimizer, mw.Strategy.of(amp={"enable": True}))
        return [model(x, y).item() for _ in range(3)]
    found: list[float] = []
    for _ in range(3):
        with torch.autocast("cpu", dtype):
            loss = net(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_it_is_autocast_to_the_bit_on_one_rank() -> None:
    (found,) = mw.simulate(losses, 1, True, None, torch.bfloat16)
    assert found == losses(False, None, torch.bfloat16)


def test_it_is_as_near_as_bfloat16_on_a_mesh() -> None:
    mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    one = losses(False, None, torch.bfloat16)
    assert all(found == pytest.approx(one, rel=2e-2) for found in mw.simulate(losses, 4, True, mesh, torch.bfloat16))
