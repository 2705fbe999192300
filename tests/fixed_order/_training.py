"""A small decoder, and its training inside `same_numbers` on any mesh, eagerly or as programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw

WORDS, WIDTH, HEADS, STEPS = 16, 8, 4, 2


class Block(nn.Module):
    def __init__(self, drop: float, reentrant: bool | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop, self.reentrant = drop, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.inner(x)
        found: Any = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return found

    def inner(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.o(out.transpose(1, 2).flatten(2)), self.drop)
        return x + self.down(F.silu(self.up(x)))


class Decoder(nn.Module):
    """A decoder that computes its loss itself."""

    def __init__(self, drop: float = 0.1, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(drop, reentrant)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


TENSOR: Mapping[str, Any] = {
    "blocks.*.[qkv]": mw.ColwiseParallel(),
    "blocks.*.o": mw.RowwiseParallel(),
    "blocks.*.up": mw.ColwiseParallel(),
    "blocks.*.down": mw.RowwiseParallel(),
}


@dataclass(frozen=True)
class Way:
    """A way to train: the axes of a mesh, styles, the stage of ZeRO, options of `to_static`, and microbatches."""

    axes: Mapping[str, int] = field(default_factory=dict[str, int])
    styles: Mapping[str, Any] = field(default_factory=dict[str, Any])
    zero: int = 0
    static: Mapping[str, Any] | None = None
    microbatches: int = 0
    drop: float = 0.1
    reentrant: bool | None = None
    clips: bool = True

    @property
    def ranks(self) -> int:
        return torch.Size(self.axes.values()).numel()

    def mesh(self) -> mw.ProcessMesh:
        sizes = tuple(self.axes.values())
        return mw.ProcessMesh(torch.arange(self.ranks).reshape(sizes).tolist(), list(self.axes))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(0, WORDS, (2, 8, 6), generator=generator)
    return tokens, labels


def made(way: Way) -> tuple[Decoder, torch.optim.Optimizer]:
    """Return the model and its optimizer on the mesh."""
    model = Decoder(way.drop, way.reentrant)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if way.axes:
        mw.parallelize(model, optimizer, way.mesh(), mw.Parallelism(way.styles, zero=way.zero))
    return model, optimizer


def trained(way: Way, steps: range = range(STEPS), start: Callable[..., Any] | None = None) -> dict[str, Tensor]:
    """Return the whole parameters after steps of AdamW; `start` gets the model and the optimizer."""
    model, optimizer = made(way)
    if start is not None:
        start(model, optimizer)
    run: Callable[..., Tensor] = model
    if way.static is not None:
        if way.clips:
            optimizer.register_step_pre_hook(lambda *_: clip(model))
        run = mw.to_static(model, None, None, optimizer, mw.Strategy.of(**way.static))
    elif way.microbatches:
        run = mw.microbatched(model, None, way.mesh(), way.microbatches)
    for step in steps:
        torch.manual_seed(step)
        with mw.same_numbers():
            loss = run(*batch(step))
            if way.static is None:
                update(way, model, optimizer, loss if not way.microbatches else None)
    return {name: mw.unshard_dtensor(p.detach()).clone() for name, p in model.named_parameters()}


def clip(model: nn.Module) -> None:
    mw.clip_grad_norm_(model.parameters(), 0.1)


def update(way: Way, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor | None) -> None:
    """Run the backward pass of a loss, if it has not run, clip the gradients, and update the parameters."""
    if loss is not None:
        loss.backward()
    if way.clips:
        clip(model)
    optimizer.step()
    optimizer.zero_grad()


def different(way: Way, wanted: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the parameters that differ in a bit on some rank."""
    ranks = mw.simulate(lambda: trained(way), way.ranks)
    return {name for found in ranks for name, p in found.items() if not torch.equal(p, wanted[name])}
