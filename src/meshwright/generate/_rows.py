"""The rows of a batch that a rank holds: logits of these rows in, tokens out.

Tokens are chosen where the logits of a row are: only the vocabulary is gathered. They stay sharded over the rows, and
are gathered at the end. Logits on a part of the ranks, such as the last stage of a pipeline, go to every rank.

Shapes: r rows, v vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm import current_communicator, world_ranks
from meshwright.engine import dtensor_from_local, reshard, shard_tensor, unshard_dtensor
from meshwright.layout import Placement, ProcessMesh, Replicate, Shard
from meshwright.tensor import DistTensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The distribution of rows: `count` in all, of which this rank holds `held` from `first` on.

    Without a mesh, every rank holds all rows as plain tensors.
    """

    count: int
    first: int
    held: int
    mesh: ProcessMesh | None = None
    placements: tuple[Placement, ...] = ()

    def logits_here(self, logits_rv: Tensor) -> Tensor:
        """Return the plain logits of this rank's rows, with the whole vocabulary."""
        if self.mesh is None:
            return unshard_dtensor(logits_rv)
        return reshard(logits_rv, self.mesh, self.placements).to_local()

    def joined(self, part: Tensor) -> Tensor:
        """Return the tensor of all rows of which `part` has this rank's rows; no communication."""
        if self.mesh is None:
            return part
        return dtensor_from_local(part, self.mesh, self.placements, shape=(self.count, *part.shape[1:]))

    def spread(self, whole: Tensor) -> Tensor:
        """Return a tensor that every rank has whole with its rows distributed."""
        return whole if self.mesh is None else shard_tensor(whole, self.mesh, self.placements)

    def resized(self, count: int) -> Rows:
        """Return the distribution of another number of rows on the same ranks."""
        return Rows(count, 0, count) if self.mesh is None else _rows(count, self.mesh, self.placements)

    @property
    def ranks(self) -> int:
        """Number of ranks with rows of their own, if all have equally many."""
        return self.count // self.held

    @property
    def of_ranks(self) -> Rows:
        """The distribution of one row for each of these ranks."""
        return self.resized(self.ranks)

    def has(self, row: int) -> bool:
        """True if this rank holds the row."""
        return self.first <= row < self.first + self.held

    def zeros(self, like: Tensor, width: int) -> Tensor:
        """Return zeros [rows, width] with the dtype of a tensor, distributed as the rows are."""
        part = (like.to_local() if isinstance(like, DistTensor) else like).new_zeros(self.held, width)
        return self.joined(part)

    def holds(self, x: Tensor) -> bool:
        """True if the parts of a tensor have the rows of their ranks."""
        if not isinstance(x, DistTensor):
            return self.mesh is None
        if self.mesh is None:
            return Shard(0) not in x.placements
        return x.mesh == self.mesh and _row_placements(x) == self.placements

    def replicated(self, whole: Tensor) -> Tensor:
        """Return a tensor that every rank has whole as a replicated one, which no hook shards."""
        return whole if self.mesh is None else shard_tensor(whole, self.mesh, [Replicate()] * self.mesh.ndim)


def rows_of(logits_rv: Tensor) -> Rows:
    """Return the distribution of rows that the logits of a first pass have."""
    count = logits_rv.shape[0]
    if not isinstance(logits_rv, DistTensor) or logits_rv.mesh.size < len(world_ranks()):
        return Rows(count, 0, count)
    return _rows(count, logits_rv.mesh, _row_placements(logits_rv))


def _row_placements(x: DistTensor) -> tuple[Placement, ...]:
    """Return where the rows of a tensor are sharded. An axis of one rank shards nothing: a single row never is."""
    sizes = x.mesh.sizes.values()
    is_sharded = (p == Shard(0) and size > 1 for p, size in zip(x.placements, sizes, strict=True))
    return tuple(Shard(0) if each else Replicate() for each in is_sharded)


def _rows(count: int, mesh: ProcessMesh, placements: tuple[Placement, ...]) -> Rows:
    like = shard_tensor(torch.empty(count, 1, device="meta"), mesh, placements).spec
    rank = current_communicator().rank
    return Rows(count, like.offset(rank, 0), like.local_shape(rank)[0], mesh, placements)
