"""Decode steps as programs: a cache in buffers is written in place, and no step copies it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw

MESH = mw.ProcessMesh([0, 1], ["tp"])
ROWS, HEADS, LENGTH, WIDTH = 2, 4, 6, 4


def index_copy(cache: Tensor, at: Tensor, new: Tensor) -> None:
    cache.index_copy_(2, at, new)


def index_put(cache: Tensor, at: Tensor, new: Tensor) -> None:
    cache[:, :, at] = new


WAYS = {"index_copy": index_copy, "index_put": index_put}


class Decoder(nn.Module):
    """Attention of one new position over a cache; `write` stores the keys and the values of this position."""

    def __init__(self, write: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write = write
        self.q, self.k, self.v, self.o = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(4))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(ROWS, HEADS, LENGTH, WIDTH))
        self.keys: Tensor
        self.values: Tensor

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for f in (self.q, self.k, self.v))
        self.write(self.keys, at, k)
        self.write(self.values, at, v)
        seen = torch.arange(LENGTH) <= at
        out = nn.functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen[None])
        return self.o(out.transpose(1, 2).flatten(2))


def mark(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
    """Shard the layers along heads, and the cache with them."""
    dim = 1 if name == "o" else 0
    if isinstance(layer, nn.Linear):
        layer.weight = nn.Parameter(mw.shard_tensor(layer.weight, mesh, [mw.Shard(dim)]))
    if isinstance(layer, Decoder):
        layer.keys, layer.values = (mw.shard_tensor(x, mesh, [mw.Shard(1)]) for x in (layer.keys, layer.values))


@pytest.mark.parametrize("way", WAYS)
def test_a_decode_step_writes_its_cache_in_place(way: str) -> None:
    inputs = torch.randn(LENGTH, ROWS, 1, HEADS * WIDTH, generator=torch.Generator().manual_seed(1))
    single = Decoder(WAYS[way])
    with torch.no_grad():
        wanted = [single(x, torch.tensor([n])) for n, x in enumerate(inputs)]

    def go() -> tuple[list[Tensor], Tensor, str]:
        model = mw.shard_layer(Decoder(WAYS[way]), MESH, mark)
        step = mw.to_static(model)
        put = [mw.Replicate()]
        found = [
            step(mw.shard_tensor(x, MESH, put), mw.shard_tensor(torch.tensor([n]), MESH, put))
            for n, x in enumerate(inputs)
        ]
        return [mw.unshard_dtensor(y) for y in found], mw.unshard_dtensor(model.keys), str(step.program)

    found, keys, program = mw.simulate(go, 2)[0]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(keys, single.keys)
    assert program.count(f"{way}_(%") == 2
    assert " copy" not in program


class Turning(nn.Module):
    """A model that turns one buffer and exchanges two others."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turned", torch.arange(9.0).view(3, 3))
        self.register_buffer("first", torch.zeros(3))
        self.register_buffer("second", torch.ones(3))
        self.turned: Tensor
        self.first: Tensor
        self.second: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.turned.copy_(self.turned.t().clone().t().t())
        before = self.first.clone()
        self.first.copy_(self.second)
        self.second.copy_(before + x.sum())
        return x + self.turned.sum(0) * self.first


def test_buffers_that_are_written_from_each_other_keep_the_values_of_one_device() -> None:
    x, single = torch.ones(3), Turning()
    wanted = [single(x) for _ in range(3)]

    def go() -> tuple[list[Tensor], list[Tensor]]:
        model = mw.shard_layer(Turning(), MESH)
        step = mw.to_static(model)
        found = [mw.unshard_dtensor(step(mw.shard_tensor(x, MESH, [mw.Replicate()]))) for _ in range(3)]
        return found, [mw.unshard_dtensor(b) for b in model.buffers()]

    found, buffers = mw.simulate(go, 2)[0]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(buffers, list(single.buffers()))
