"""Models with a list of layers, which a pipeline may split."""

from __future__ import annotations

from torch import Tensor, nn

ODD = 999
"""A size that none of the tested numbers of ranks divides."""


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class Blocks(nn.Module):
    """A list of layers; with `skips`, the output of the first one is added again after the last."""

    def __init__(self, layers: int = 4, size: int = ODD, skips: bool = False) -> None:
        super().__init__()
        self.layers, self.skips = nn.ModuleList(Block(size) for _ in range(layers)), skips

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return x + first if self.skips else x
