"""Packing of the parts of several tensors into one buffer: one call gathers them, and one reduces their gradients.

The buffer of a rank holds its parts one after the other. It is padded to the length of the longest buffer, since parts
may be uneven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from meshwright.layout import Layout, Range, Spec, axes_of
from meshwright.reshard import plan


def gathered_axes(part: Spec, whole: Spec) -> tuple[str, ...]:
    """Return the axes along which a part is gathered to a whole tensor, outermost first.

    The result is empty unless the innermost axes of one dim are gathered, and nothing else.
    """
    layout = part.layout
    if part.strides is not None or layout.partial or not (layout.is_simple and whole.layout.is_simple):
        return ()
    pairs = [(axes_of(a), axes_of(b)) for a, b in zip(layout.dims, whole.layout.dims, strict=True) if a != b]
    if len(pairs) != 1:
        return ()
    sharded, left = pairs[0]
    return sharded[len(left) :] if sharded[: len(left)] == left else ()


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The local shape of a whole tensor, the dim that is sharded, and the range of each rank of the group along it."""

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[Range, ...]

    def shape_of(self, place: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.ranges[place][1], *self.shape[self.dim + 1 :])

    def size_of(self, place: int) -> int:
        return prod(self.shape_of(place))


def _pieces(part: Spec, whole: Spec, rank: int, group: Sequence[int]) -> _Pieces:
    dims = zip(part.layout.dims, whole.layout.dims, strict=True)
    dim = next(at for at, (one, other) in enumerate(dims) if one != other)
    start = whole.offset(rank, dim)
    ranges = [part.local_ranges(r)[dim] for r in group]
    return _Pieces(whole.local_shape(rank), dim, tuple((first - start, length) for first, length in ranges))


class JointPlan:
    """Packing of tensors of one dtype, whose parts are gathered along the same axes of one mesh, on one rank."""

    def __init__(self, parts: Sequence[Spec], wholes: Sequence[Spec], rank: int) -> None:
        mesh, dtype = parts[0].mesh, parts[0].dtype
        axes = gathered_axes(parts[0], wholes[0])
        group = mesh.group(rank, axes)
        self._place = group.index(rank)
        self._pieces = [_pieces(part, whole, rank, group) for part, whole in zip(parts, wholes, strict=True)]
        self._sizes = [[piece.size_of(place) for piece in self._pieces] for place in range(len(group))]
        self._length = max(1, *map(sum, self._sizes))
        own = Spec(mesh.get_submesh(axes, rank), Layout((axes,)), (len(group) * self._length,), dtype)
        self.gather = plan(own, own.with_layout(Layout(((),))))
        """The all-gather of the buffers."""
        self.reduce = plan(own.with_layout(Layout(((),), tuple((axis, "sum") for axis in axes))), own)
        """The reduce-scatter of buffers with the terms of each rank."""

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        """Return this rank's buffer with copies of its parts."""
        return torch.cat(self._padded([part.reshape(-1) for part in parts], self._place))

    def unpack(self, buffers: Tensor) -> list[Tensor]:
        """Return the whole tensors in new memory, from the buffers of all ranks one after the other."""
        rows = buffers.view(-1, self._length).unbind()
        parts = [row[: sum(sizes)].split(sizes) for row, sizes in zip(rows, self._sizes, strict=True)]
        return [
            torch.cat([own[at].view(piece.shape_of(place)) for place, own in enumerate(parts)], piece.dim)
            for at, piece in enumerate(self._pieces)
        ]

    def pack_terms(self, terms: Sequence[Tensor]) -> Tensor:
        """Return the buffers for all ranks one after the other, from this rank's terms of the whole tensors."""
        rows: list[Tensor] = []
        for place in range(len(self._sizes)):
            cut = [x.narrow(piece.dim, *piece.ranges[place]) for x, piece in zip(terms, self._pieces, strict=True)]
            rows += self._padded([x.reshape(-1) for x in cut], place)
        return torch.cat(rows)

    def unpack_sums(self, buffer: Tensor) -> list[Tensor]:
        """Return this rank's parts of the sums; they share the memory of the buffer."""
        sizes = self._sizes[self._place]
        parts = buffer[: sum(sizes)].split(sizes)
        return [part.view(piece.shape_of(self._place)) for part, piece in zip(parts, self._pieces, strict=True)]

    def _padded(self, parts: list[Tensor], place: int) -> list[Tensor]:
        left = self._length - sum(self._sizes[place])
        return [*parts, parts[0].new_zeros(left)] if left else parts


@lru_cache(maxsize=1024)
def joint_plan(parts: tuple[Spec, ...], wholes: tuple[Spec, ...], rank: int) -> JointPlan:
    """Return the packing of these tensors on a rank."""
    return JointPlan(parts, wholes, rank)
