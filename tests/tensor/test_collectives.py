"""Exact counts of the communication of eager mode, to find regressions without a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import PeerlessCommunicator, using_communicator

MESH = mw.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "tp"])
COLUMN, ROW = [mw.Replicate(), mw.Shard(0)], [mw.Replicate(), mw.Shard(1)]


class Block(nn.Module):
    """A pre-norm transformer block with heads and inner width sharded over tp."""

    CUTS = {"q": COLUMN, "k": COLUMN, "v": COLUMN, "up": COLUMN, "o": ROW, "down": ROW}  # noqa: RUF012 - a constant

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


def mark(name: str, module: nn.Module, mesh: mw.ProcessMesh) -> None:
    cut = Block.CUTS.get(name.split(".")[-1])
    if cut is not None:
        module.weight = mw.shard_tensor(module.weight, mesh, cut)


def counted(run: Callable[[], Any]) -> dict[str, int]:
    """Return the number of calls by kind that `run` makes on rank 0 of 4."""
    with using_communicator(PeerlessCommunicator(0, 4)) as communicator:
        run()
        return dict(communicator.seen.calls)


def blocks(count: int, at: list[mw.Shard | mw.Replicate]) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(*[Block() for _ in range(count)])
    mw.shard_layer(model, MESH, mark)
    return model, mw.shard_tensor(torch.randn(4, 8, 16), MESH, at)


def test_tensor_parallel_blocks_communicate_as_in_megatron() -> None:
    """Two all-reduces forward and two backward per block; terms pass through the residual stream."""

    def forward(count: int) -> dict[str, int]:
        def run() -> None:
            model, x = blocks(count, [mw.Replicate(), mw.Replicate()])
            model(x).square().sum()

        return counted(run)

    def both(count: int) -> dict[str, int]:
        def run() -> None:
            model, x = blocks(count, [mw.Replicate(), mw.Replicate()])
            x.requires_grad_()
            model(x).square().sum().backward()

        return counted(run)

    assert [forward(n) for n in (1, 2, 3)] == [{"all_reduce": 2 * n} for n in (1, 2, 3)]
    assert [both(n) for n in (1, 2, 3)] == [{"all_reduce": 4 * n} for n in (1, 2, 3)]


def test_data_parallel_gradients_are_one_bucket() -> None:
    """Several backward passes accumulate locally; the first read of a gradient reduces all of them at once."""

    def run() -> None:
        model, x = blocks(2, [mw.Shard(0)])
        for _ in range(3):
            model(x).sum().backward()
        assert model[0].q.weight.grad is not None

    assert counted(run) == {"all_reduce": 3 * (4 * 2 - 1) + 1}  # the first block's input requires no gradient


def test_a_loss_is_reduced_once_for_any_number_of_reads() -> None:
    def run() -> None:
        x = mw.shard_tensor(torch.randn(4, 3), MESH, [mw.Shard(0)])
        loss = x.mean()
        assert loss.item() == loss.item()

    assert counted(run)["all_reduce"] <= 2
