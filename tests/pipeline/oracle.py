"""A model with any placement of stages, compared with the same steps on one device, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.engine import DistModel

WIDTH, STEPS = 6, 2
Meshes = Sequence[Any]


def _block(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH))


class Chain(nn.Module):
    """Blocks with a skip connection from the first one to the last, a mask, and a buffer that each batch updates."""

    def __init__(self, chunks: int, tied: bool = False, buffers: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.entry = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(_block(dropout) for _ in range(chunks))
        self.norm = nn.BatchNorm1d(WIDTH) if buffers else nn.LayerNorm(WIDTH)
        self.exit = nn.Linear(WIDTH, 11, bias=False)
        if tied:
            self.exit.weight = self.entry.weight
        self.homes: Meshes = ()
        self.tied = tied

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = first = self.entry(tokens)
        for n, block in enumerate(self.blocks):
            x = block(self._to(n, x)) + self._to(n, mask).unsqueeze(-1) * x.sum() if n == 0 else block(self._to(n, x))
        last = len(self.blocks) - 1
        x = self.norm((x + self._to(last, first)).flatten(0, 1)).unflatten(0, (-1, tokens.shape[1]))
        if not self.tied:
            return self.exit(x)
        return x @ self._to(last, self.exit.weight).t()

    def _to(self, n: int, x: Tensor) -> Tensor:
        if not self.homes:
            return x
        y = mw.reshard(x, self.homes[n], [mw.Replicate()])
        return mw.pipe_split(y) if n and self.homes[n] is self.homes[n - 1] else y


def laid(model: Chain, way: Sequence[int], ranks_per_stage: int) -> Chain:
    """Return the model with chunk c on the ranks of stage way[c]."""
    homes = [
        mw.ProcessMesh(list(range(s * ranks_per_stage, (s + 1) * ranks_per_stage)), ["dp"]) for s in range(max(way) + 1)
    ]
    model.homes = [homes[s] for s in way]
    mw.shard_layer(model.entry, homes[0])
    if model.tied:
        model.exit.weight = model.entry.weight
    return model


def batch(number: int, rows: int, length: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(number)
    shape = (rows, length)
    tokens, labels = (torch.randint(0, 11, shape, generator=g) for _ in range(2))
    return tokens, torch.rand(shape, generator=g) > 0.5, labels


def loss_of(out: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())


def alone(chunks: int, microbatches: int, rows: int, tied: bool = False, buffers: bool = True) -> list[Any]:
    """Return the losses, parameters and buffers of the same steps on one device, with accumulated gradients."""
    torch.manual_seed(1)
    model = Chain(chunks, tied, buffers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses: list[float] = []
    for step in range(STEPS):
        total = 0.0
        for tokens, mask, labels in zip(*(x.chunk(microbatches) for x in batch(step, rows)), strict=True):
            loss = loss_of(model(tokens, mask), labels) / microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return [losses, {name: x.detach() for name, x in model.state_dict().items()}]


def piped(
    way: Sequence[int],
    options: dict[str, Any],
    rows: int,
    tied: bool = False,
    ranks_per_stage: int = 1,
    then: Callable[[DistModel], Any] = lambda dist: None,
    buffers: bool = True,
    device: str = "cpu",
    dropout: float = 0.0,
    **strategy: Any,
) -> list[Any]:
    """Return the results of this rank in static mode."""
    torch.manual_seed(1)
    model = laid(Chain(len(way), tied, buffers, dropout).to(device), way, ranks_per_stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(2)  # the parameters were drawn on the CPU, whatever the device
    dist = mw.to_static(
        model,
        None,
        lambda out, labels: loss_of(out, mw.reshard(labels, model.homes[-1], [mw.Replicate()])),
        optimizer,
        mw.Strategy.of(pipeline={"enable": True, **options}, **strategy),
    )
    dist.train()
    losses = [dist(*(x.to(device) for x in batch(step, rows))).item() for step in range(STEPS)]
    state = {name: mw.unshard_dtensor(x.detach()).cpu() for name, x in dist.state_dict("param").items()}
    return [losses, state, then(dist)]


def compare(found: Sequence[Any], expected: Sequence[Any]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert found[1].keys() <= expected[1].keys()
    for name, x in found[1].items():
        torch.testing.assert_close(
            x, expected[1][name], rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
