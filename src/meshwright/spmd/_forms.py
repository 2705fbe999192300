"""What a second form may ask about the call it stands in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class LocalCall(Protocol):
    """The part of a call that this rank carries out; given to a form before the call's own arguments.

    All methods are differentiable, and every rank of the mesh calls them in the same order.
    """

    def start(self, operand: int, dim: int) -> int:
        """First global index along `dim` of the part of operand `operand` that this rank holds."""
        ...

    def total(self, operand: int, dim: int) -> int:
        """Global size of `dim` of operand `operand`."""
        ...

    def out_shape(self, result: int) -> tuple[int, ...]:
        """Local shape of result `result`."""
        ...

    def ranks(self, operand: int, dim: int) -> int:
        """Number of pieces that `dim` of operand `operand` is cut into."""
        ...

    def index(self, operand: int, dim: int) -> int:
        """Which of these pieces this rank holds."""
        ...

    def gather(self, x: Tensor, operand: int, dim: int) -> Tensor:
        """The `x` of every rank that holds another piece of `dim` of `operand`, stacked along a new first dim.

        All have the shape of this rank's. The gradient of each is sent back to where it came from and added.
        """
        ...

    def permute(self, x: Tensor, operand: int, dim: int, sources: Sequence[int]) -> Tensor:
        """The `x` of the rank that holds piece `sources[i]` of `dim` of `operand`, where this rank holds piece i.

        All have the shape of this rank's; each piece is named once.
        """
        ...

    def recut(self, x: Tensor, operand: int, dim: int, to: int) -> Tensor:
        """This rank's part `x` of operand `operand`, cut along `to` by what cut it along `dim`."""
        ...

    def recut_result(self, x: Tensor, result: int, dim: int, to: int) -> Tensor:
        """This rank's part of result `result`, from a part `x` that is cut along `to` in the place of `dim`."""
        ...

    def halo(self, x: Tensor, operand: int, dim: int, before: int, after: int) -> Tensor:
        """The local part of operand `operand` and rows of `dim` beside it: its neighbours', zeros beyond the ends."""
        ...

    def sum(self, x: Tensor, operand: int, dim: int) -> Tensor:
        """The sum of `x` over the ranks that hold pieces of `dim` of `operand`; each of them uses it in its own way."""
        ...

    def max(self, x: Tensor, operand: int, dim: int) -> Tensor:
        """The maximum of `x` over those ranks, without a gradient."""
        ...
