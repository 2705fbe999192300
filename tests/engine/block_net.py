"""A model of blocks between two layers, whose blocks are the units of ZeRO-3."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, INNER, CLASSES = 9, 13, 7
"""Sizes that no mesh divides evenly."""


class Block(nn.Module):
    """x + down(relu(up(norm(x))))."""

    def __init__(self, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between two layers."""

    def __init__(self, blocks: int = 3, width: int = WIDTH, inner: int = INNER, classes: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(blocks))
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)
