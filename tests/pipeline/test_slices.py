"""Slices of sequences in a small pipeline give the numbers of one device; tests/engine/test_slices.py tests more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw

WORDS, WIDTH, STEPS = 7, 4, 2


class Block(nn.Module):
    """A block of causal attention with one head, and dropout."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return self.drop(x + seen.relu() * x.new_full((1,), 0.5).expand(WIDTH))


class Reader(nn.Module):
    """A model of two blocks with learned positions, a tied embedding, and a loss that ignores some labels."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(Block(drop) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=2)


def batch(step: int, rows: int, length: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(step)
    return [torch.randint(0, WORDS, (rows, length), generator=g) for _ in range(2)]


def train(drop: float, microbatches: int, length: int, options: dict[str, Any]) -> list[Any]:
    """Return losses and parameters after some steps, of one device without options, else of this rank."""
    model = Reader(drop)
    if options:
        mw.split_pipeline(model, mw.ProcessMesh([0, 1], ["pp"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pipeline = {"enable": True, "accumulate_steps": microbatches, **options}
    dist = mw.to_static(model, None, None, optimizer, mw.Strategy.of(pipeline=pipeline)).train() if options else None
    torch.manual_seed(5)
    losses: list[float] = []
    for step in range(STEPS):
        given = batch(step, 2 * microbatches, length)
        if dist is not None:
            losses.append(dist(*given).item())
            continue
        pieces = zip(*(x.chunk(microbatches) for x in given), strict=True)
        loss = sum(model(*piece) / microbatches for piece in pieces)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = dist.state_dict("param").items() if dist is not None else model.named_parameters()
    return [losses, {name: mw.unshard_dtensor(x.detach()) if dist else x.detach() for name, x in state}]


@pytest.mark.parametrize(
    ("name", "slices", "microbatches", "length", "drop"),
    [
        ("Seq1F1B", 2, 2, 5, 0.0),
        ("TeraPipe", (3, 2, 1), 1, 6, 0.0),
        ("Seq1F1B", 3, 2, 6, 0.4),
    ],
)
def test_numbers_are_those_of_one_device(name: str, slices: Any, microbatches: int, length: int, drop: float) -> None:
    options = {"schedule_mode": name, "slices": slices}
    expected = train(drop, microbatches, length, {})
    for found in mw.simulate(lambda: train(drop, microbatches, length, options), 2):
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
        for n, x in found[1].items():
            torch.testing.assert_close(x, expected[1][n], rtol=1e-4, atol=2e-6, msg=lambda t, n=n: f"{n}: {t}")
