"""Static programs in which a rank has an empty part: every rank takes part in every collective, as in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw

RANKS = 4
SIZE = 3
"""The size of the sharded dims: the last rank has no piece."""


class Attention(nn.Module):
    """Attention with sharded heads, with a mask that is sharded otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        keys = torch.arange(RANKS * SIZE * 16.0).sin().view(RANKS, SIZE, 4, 4)
        mask = (x[:, :1] >= 0)[:, None, :, None].expand(RANKS, 1, 4, 4)
        return F.scaled_dot_product_attention(keys * self.weight, keys, keys, mask)


class Table(nn.Module):
    """A lookup by a function with the table as argument."""

    def __init__(self, lookup: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.lookup = nn.Parameter(torch.randn(SIZE, RANKS)), lookup

    def forward(self, x: Tensor) -> Tensor:
        return self.lookup(x, self.weight)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(SIZE, 4),
    "embedding, padding_idx": lambda: nn.Embedding(SIZE, 4, padding_idx=1),
    "rows": lambda: Table(lambda x, w: w[x]),
    "index_select": lambda: Table(lambda x, w: w.index_select(0, x.flatten())),
    "gather": lambda: Table(lambda x, w: w.gather(0, x)),
    "take_along_dim": lambda: Table(lambda x, w: w.take_along_dim(x, 0)),
    "scatter": lambda: Table(lambda x, w: w.scatter_add(0, x[:SIZE], w * 2)),
    "index_add": lambda: Table(lambda x, w: w.index_add(0, x[:, 0], torch.ones(RANKS, RANKS))),
    "cross_entropy": lambda: Table(lambda x, w: F.cross_entropy(w.t(), x[:, 0])),
    "masked": lambda: Table(lambda x, w: w.masked_fill(x[:SIZE] == 1, 0.5)),
    "one_hot": lambda: Table(lambda x, w: F.one_hot(x, SIZE).float() @ w),
    "attention": Attention,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_static_step_runs_with_empty_parts(name: str) -> None:
    ids = torch.arange(RANKS * RANKS).view(RANKS, RANKS) % SIZE

    def losses(mark: Callable[[Any], Any], static: bool) -> list[float]:
        torch.manual_seed(0)
        model, x = MODELS[name](), mark(ids)
        model.weight = mark(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(out: Tensor, _: Tensor) -> Tensor:
            return out.square().sum()

        if static:
            step = mw.to_static(model, loss=loss, optimizer=optimizer)
            return [step(x, x).item() for _ in range(3)]
        found: list[float] = []
        for _ in range(3):
            optimizer.zero_grad()
            value = loss(model(x), x)
            value.backward()
            optimizer.step()
            found.append(value.item())
        return found

    want = losses(lambda t: t, False)
    mesh = mw.ProcessMesh(range(RANKS), ["x"])
    got = mw.simulate(lambda: losses(lambda t: mw.shard_tensor(t, mesh, [mw.Shard(0)]), True), RANKS)
    for found in got:
        assert found == pytest.approx(want, rel=1e-4)
