"""The collectives of a communicator that conversions need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

Group = tuple[int, ...]
Shape = tuple[int, ...]


class Mover(Protocol):
    """Protocol of a communicator: the five collectives that a plan needs.

    Tensors may be empty or not contiguous; results are new, contiguous tensors.
    """

    rank: int

    def all_reduce(self, x: Tensor, op: str, group: Group) -> Tensor: ...

    def all_gather(self, x: Tensor, group: Group, shapes: Sequence[Shape]) -> list[Tensor]: ...

    def reduce_scatter(self, pieces: Sequence[Tensor], op: str, group: Group) -> Tensor: ...

    def all_to_all(self, pieces: Sequence[Tensor], shapes: Sequence[Shape], group: Group) -> list[Tensor]: ...

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Shape, torch.dtype, torch.device]],
        group: Group,
    ) -> list[Tensor]: ...


class OutMover(Mover, Protocol):
    """Protocol of a communicator whose collectives can write their results to given tensors `out`."""

    def all_reduce(self, x: Tensor, op: str, group: Group, *, out: Tensor | None = None) -> Tensor: ...

    def all_gather(
        self, x: Tensor, group: Group, shapes: Sequence[Shape], out: Sequence[Tensor] | None = None
    ) -> list[Tensor]: ...

    def reduce_scatter(self, pieces: Sequence[Tensor], op: str, group: Group, out: Tensor | None = None) -> Tensor: ...

    def all_to_all(
        self,
        pieces: Sequence[Tensor],
        shapes: Sequence[Shape],
        group: Group,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]: ...

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Shape, torch.dtype, torch.device]],
        group: Group,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]: ...
