"""Models that need more than one kind of layer, with marks for the ranks: attention, experts, stages and language."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.comm import current_communicator

EXPERTS, CHOICES, WORDS, WIDTH = 4, 2, 20, 16
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Marked:
    """A marked model, a batch for it, and the loss."""

    model: nn.Module
    batch: tuple[Tensor, Tensor]
    loss: Loss = F.mse_loss


def mesh_of(*axes: str) -> mw.ProcessMesh:
    """Return a mesh of all ranks, with one axis or with two axes of equal size or nearly so."""
    ranks = list(range(current_communicator().size))
    if len(axes) == 1:
        return mw.ProcessMesh(ranks, list(axes))
    half = len(ranks) // 2
    return mw.ProcessMesh([ranks[:half], ranks[half:]], list(axes))


class Attention(nn.Module):
    """Causal attention, which sends keys and values around a ring if the sequence is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_bsd: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(x_bsd).chunk(3, -1))
        with mw.context_parallel("ring"):
            x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x.transpose(1, 2).flatten(2))


class Mixture(nn.Module):
    """A router and experts, each with a bounded number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.router(x).softmax(-1).topk(CHOICES)
        return mw.dispatch_experts(x, indices, weights, _feed_forward, [self.up, self.down], capacity=8)


def _feed_forward(rows: Tensor, ends: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.grouped_mm(F.grouped_mm(rows, up, offs=ends).tanh(), down, offs=ends)


class Language(nn.Module):
    """Logits for the token after each token, from one layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(WORDS, WIDTH), Attention()
        self.up, self.down, self.head = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens_bs: Tensor) -> Tensor:
        x = self.words(tokens_bs)
        x = x + self.attention(x)
        return self.head(x + self.down(self.up(x).relu()))


def _numbers(seed: int, *shape: int) -> Tensor:
    return torch.linspace(-1, 2, torch.Size(shape).numel()).view(shape).add(seed).sin()


def _on_mesh(
    model: nn.Module, batch: Sequence[Tensor], mesh: mw.ProcessMesh, dims: Sequence[int], loss: Loss = F.mse_loss
) -> Marked:
    """Return the model with whole parameters, except for marked ones, and the batch with these dims sharded."""
    mw.shard_layer(model, mesh)
    x, y = (mw.shard_tensor(each, mesh, [mw.Shard(dim) for dim in dims]) for each in batch)
    return Marked(model, (x, y), loss)


def with_ring(device: torch.device | str, *axes: str) -> Marked:
    """Return attention along a sequence that the last axis shards."""
    batch = [_numbers(k, 4, 16, WIDTH).to(device) for k in range(2)]
    return _on_mesh(Attention().to(device), batch, mesh_of(*axes), range(2 - len(axes), 2))


def with_experts(device: torch.device | str, *axes: str) -> Marked:
    """Return experts that the last axis shards, and tokens that all axes shard."""
    model, mesh = Mixture().to(device), mesh_of(*axes)
    placements = [*[mw.Replicate()] * (len(axes) - 1), mw.Shard(0)]
    for name in ("up", "down"):
        setattr(model, name, mw.shard_tensor(getattr(model, name), mesh, placements))
    return _on_mesh(model, [_numbers(k, 16, WIDTH).to(device) for k in range(2)], mesh, [0] * len(axes))


def with_stages(device: torch.device | str, *axes: str) -> Marked:
    """Return layers on stages along the first axis, with rows that the second axis shards."""
    mesh, rows = mesh_of(*axes), [mw.Shard(0)] * (len(axes) - 1) or [mw.Replicate()]
    stages = mesh.get_dim_size(axes[0])
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages))
    model = mw.split_pipeline(nn.Sequential(*layers).to(device), mesh, axis=axes[0], batch=rows)
    last = mesh[axes[0], stages - 1]

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, mw.reshard(y, last, rows))

    x, y = (_numbers(k, 8, WIDTH).to(device) for k in range(2))
    return Marked(model, (x, y), loss)


def with_words(device: torch.device | str, shard: Callable[..., None], *axes: str) -> Marked:
    """Return a language model that `shard` marks, and tokens."""
    model, mesh = Language().to(device), mesh_of(*axes)
    tokens = (torch.arange(64).view(8, 8) * 7 % WORDS).to(device)
    placement = mw.Shard(0) if axes == ("dp",) else mw.Replicate()
    mw.shard_layer(model, mesh, shard)
    x, y = (mw.shard_tensor(each, mesh, [placement]) for each in (tokens, (tokens + 1) % WORDS))
    return Marked(model, (x, y), _word_loss)


def _word_loss(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())
