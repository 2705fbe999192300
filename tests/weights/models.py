"""A small language model, and its marks on any mesh."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import meshwright as mw

PROMPTS = [[1, 2, 3], [4], [5, 6]]
BATCH = torch.tensor([[1, 2, 3, 4], [3, 4, 5, 6]])
STYLES = {"up": mw.ColwiseParallel(), "head": mw.RowwiseParallel()}
SQUARE, LINE = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"]), mw.ProcessMesh(range(4), ["tp"])


class Decoder(nn.Module):
    """A causal model: a token depends on the mean of all tokens so far."""

    def __init__(self, words: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.up, self.head = nn.Embedding(words, 16), nn.Linear(16, 30), nn.Linear(30, words)
        self.register_buffer("scale", torch.tensor(4.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens).cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        return self.scale * self.head(self.up(x).relu())


def marked(mesh: mw.ProcessMesh, meta: bool = False) -> Decoder:
    """Return the model on a mesh, with values or on the meta device."""
    with torch.device("meta" if meta else "cpu"):
        model = Decoder()
    mw.parallelize(model, None, mesh, mw.Parallelism(STYLES))
    return model


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Make a step of training."""
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    loss_of(model(BATCH), BATCH).backward()
    optimizer.step()
    optimizer.zero_grad()


def wholes(model: nn.Module) -> dict[str, Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: mw.unshard_dtensor(x.detach()) for name, x in named}


def equal(model: nn.Module, other: nn.Module) -> bool:
    """True if both models have the same values."""
    mine, others = wholes(model), wholes(other)
    return mine.keys() == others.keys() and all(torch.equal(x, others[name]) for name, x in mine.items())
