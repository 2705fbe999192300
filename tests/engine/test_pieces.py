"""`full_graph=False`: what cannot be captured runs as Python, between programs, with eager mode's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.graph import CaptureError

MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])


class Asking(nn.Module):
    """Asks a tensor in Python which way to go."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden) if hidden.sum().item() > 0 else hidden * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16))
        self.asking = Asking()
        self.behind = nn.Sequential(nn.Dropout(0.1), nn.BatchNorm1d(16), nn.Linear(16, 4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.behind(self.asking(self.before(x))), labels)


def train(static: bool, full_graph: bool = False) -> Any:
    torch.manual_seed(0)
    model = Model()
    first = model.before[0]
    first.weight = mw.shard_tensor(first.weight, MESH, [mw.Replicate(), mw.Shard(0)])
    mw.shard_layer(model, MESH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dist_model = mw.to_static(model, None, None, optimizer, mw.Strategy(full_graph=full_graph))
    losses: list[float] = []
    for n in (8, 8, 4, 12):
        torch.manual_seed(n)
        batch = [mw.shard_tensor(v, MESH, [mw.Shard(0)]) for v in (torch.randn(n, 8), torch.randint(0, 4, (n,)))]
        if static:
            losses.append(dist_model(*batch).item())
            continue
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    values = {name: mw.unshard_dtensor(x.detach()) for name, x in model.state_dict().items()}
    return losses, values, dist_model.pieces, "forward" in model.before.__dict__


def test_pieces_have_the_numbers_of_eager_mode() -> None:
    eager, static = mw.simulate(lambda: train(False), 4)[0], mw.simulate(lambda: train(True), 4)[0]
    assert static[0] == eager[0]
    assert all(torch.equal(static[1][name], value) for name, value in eager[1].items())
    assert set(static[2].compiled) == {"before", "asking.first", "asking.second", "behind"}
    assert set(static[2].eager) == {"", "asking"}
    assert "test_pieces.py" in static[2].eager["asking"]
    assert not static[3]


def test_the_full_graph_is_demanded_by_default() -> None:
    with pytest.raises(CaptureError, match=r"test_pieces\.py"):
        mw.simulate(lambda: train(True, full_graph=True), 4)
