"""Interface through which a local form reads its call and communicates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class LocalCall(Protocol):
    """The local part of a call on this rank; the first argument of a form, before the call's own arguments.

    All methods are differentiable, and every rank of the mesh calls them in the same order.
    """

    def start(self, operand: int, dim: int) -> int:
        """Return the first global index along `dim` of this rank's local tensor of operand `operand`."""
        ...

    def total(self, operand: int, dim: int) -> int:
        """Return the global size of `dim` of operand `operand`."""
        ...

    def out_shape(self, result: int) -> tuple[int, ...]:
        """Return the local shape of result `result`."""
        ...

    def ranks(self, operand: int, dim: int) -> int:
        """Return the number of shards of `dim` of operand `operand`."""
        ...

    def index(self, operand: int, dim: int) -> int:
        """Return the index of this rank's shard."""
        ...

    def gather(self, x: Tensor, operand: int, dim: int) -> Tensor:
        """Return the `x` of all ranks along the shards of `dim` of `operand`, stacked along a new first dim.

        `x` has the same shape on all ranks. The gradient of each `x` is sent back to its rank and summed.
        """
        ...

    def gather_invariant(self, x: Tensor, operand: int, dim: int) -> Tensor:
        """Return the result of `gather` for a form that computes the same from it on all these ranks.

        So the gradient is the same on all of them, and the gradient of `x` takes no communication.
        """
        ...

    def permute(self, x: Tensor, operand: int, dim: int, sources: Sequence[int]) -> Tensor:
        """Return the `x` of the rank with shard `sources[i]` of `dim` of `operand`, on the rank with shard i.

        `x` has the same shape on all ranks; `sources` is a permutation.
        """
        ...

    def recut(self, x: Tensor, operand: int, dim: int, to: int) -> Tensor:
        """Return the local tensor `x` of operand `operand`, resharded from `dim` to `to`."""
        ...

    def recut_result(self, x: Tensor, result: int, dim: int, to: int) -> Tensor:
        """Return the local tensor of result `result`: `x`, resharded from `to` to `dim`."""
        ...

    def halo(self, x: Tensor, operand: int, dim: int, before: int, after: int) -> Tensor:
        """Return the local tensor with rows of the neighbours along `dim`; rows beyond the ends are zero."""
        ...

    def sum(self, x: Tensor, operand: int, dim: int) -> Tensor:
        """Return the sum of `x` over the ranks along the shards of `dim`; each rank uses the sum differently."""
        ...

    def max(self, x: Tensor, operand: int, dim: int) -> Tensor:
        """Return the maximum of `x` over the ranks along the shards of `dim` of `operand`, without a gradient."""
        ...
