"""Choose the samples of a step: whole batches by global sample index, for any number of ranks.

The order of an epoch is a permutation that is computed index by index. It is a Feistel network with cycle walking
(Black and Rogaway 2002), so it needs no memory for any size of the data set. The samples of a step depend only on the
seed, the epoch and the number of samples of the epoch that were taken before, not on the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from meshwright.comm import current_communicator
from meshwright.layout import MeshError, Placement, ProcessMesh, Replicate, Shard, Spec, layout_of

from .._errors import BatchError
from ..marks.default_mesh import resolve_mesh

Axis = str | int | None | tuple[str | int, ...]
"""The mesh axis over which a batch is split: its name, its index, a tuple of axes, or None for no split."""
_ROUNDS = 6
Words = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True, slots=True)
class SamplePosition:
    """The number of samples that were taken of an epoch."""

    epoch: int = 0
    taken: int = 0


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The samples of a step: `count` samples from the place `of` on, and the place after them."""

    of: SamplePosition
    count: int
    behind: SamplePosition


class GlobalSampler:
    """Batches of sample indices for a `DataLoader`; pass it as `batch_sampler`.

    `data` is a data set or its length; `batch` is the number of samples of a step over all ranks. Every rank gets whole
    global batches, as `shard_dataloader` expects them. With `axis`, each rank gets only its rows along that axis of
    `mesh`, for samples that are expensive to read. One iteration yields the rest of the epoch; the next one yields the
    next epoch, in another order. The last batch may be smaller, or is dropped with `drop_last`.

    `state_dict` has the epoch and the number of samples taken. A run that resumes there, on other ranks or with another
    batch size, takes each remaining sample of the epoch once.

    Raises:
        BatchError: an epoch would have no batch.

    >>> sampler = GlobalSampler(7, 3, shuffle=False)
    >>> list(sampler), sampler.place
    ([[0, 1, 2], [3, 4, 5], [6]], SamplePosition(epoch=1, taken=0))
    """

    def __init__(
        self,
        data: Sized | int,
        batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        mesh: ProcessMesh | None = None,
        axis: Axis = None,
    ) -> None:
        self.length = data if isinstance(data, int) else len(data)
        self.batch, self.seed, self.shuffle, self.drop_last = batch, seed, shuffle, drop_last
        if batch < 1 or self.length < (batch if drop_last else 1):
            raise BatchError(
                f"batches of {batch} samples",
                f"a data set of {self.length}, drop_last={drop_last}",
                "an epoch needs at least one batch",
                "pass a smaller batch, or drop_last=False",
            )
        self.target = None if axis is None else target(mesh, axis)
        self.place = SamplePosition()

    @property
    def is_split(self) -> bool:
        """True if this rank gets only its own rows."""
        return self.target is not None

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return self.length // self.batch if self.drop_last else -(-self.length // self.batch)

    def __iter__(self) -> Iterator[list[int]]:
        for rows in self.steps(self.place):
            self.place = rows.behind
            yield self.indices(rows)

    def steps(self, place: SamplePosition) -> Iterator[StepSamples]:
        """Yield the steps from a place to the end of its epoch."""
        end = SamplePosition(place.epoch + 1)
        while place.epoch < end.epoch:
            count = min(self.batch, self.length - place.taken)
            behind = self._settled(SamplePosition(place.epoch, place.taken + count))
            yield StepSamples(place, count, behind)
            place = behind

    def indices(self, rows: StepSamples) -> list[int]:
        """Return the samples that this rank reads for a step; one sample, for its shape, if the rank has no row."""
        start, count = self.part(rows)
        first = rows.of.taken + min(start, rows.count - 1)
        at = np.arange(first, first + max(count, 1), dtype=np.uint64)
        found = permuted(at, self.length, self.seed, rows.of.epoch) if self.shuffle else at
        return found.tolist()

    def part(self, rows: StepSamples) -> tuple[int, int]:
        """Return the first row and the number of rows of this rank's part of a batch."""
        if self.target is None or current_communicator().rank not in self.target[0]:
            return 0, rows.count
        mesh, placements = self.target
        spec = Spec(mesh, layout_of(placements, 1, mesh), (rows.count,), torch.int64)
        return spec.local_ranges(current_communicator().rank)[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the place, and the parameters of the order; equal on every rank."""
        return {
            "epoch": self.place.epoch,
            "taken": self.place.taken,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "length": self.length,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the samples that were taken, in the same order.

        Raises:
            BatchError: the data set had another length, and thus another order.
        """
        if state["length"] != self.length:
            raise BatchError(
                f"resuming a data set of {self.length} samples",
                f"a position in a data set of {state['length']}",
                "the order of the samples depends on their number",
                "use the data set of the saved run, or a new sampler",
            )
        self.seed, self.shuffle = state["seed"], state["shuffle"]
        self.place = self._settled(SamplePosition(state["epoch"], state["taken"]))

    def _settled(self, place: SamplePosition) -> SamplePosition:
        """Return the place, or the beginning of the next epoch if no batch is left."""
        left = self.length - place.taken
        return SamplePosition(place.epoch + 1) if left < (self.batch if self.drop_last else 1) else place


def target(mesh: ProcessMesh | None, axis: Axis) -> tuple[ProcessMesh, list[Placement]]:
    """Return the mesh, and the placements of a tensor with rows split along one axis or several."""
    mesh = resolve_mesh(mesh)
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for one in axis if isinstance(axis, tuple) else () if axis is None else (axis,):
        if isinstance(one, int) and not -mesh.ndim <= one < mesh.ndim:
            names = list(mesh.dim_names)
            raise MeshError(f"shard_dims {one}", repr(mesh), f"there is no axis {one}", f"write one of {names}")
        placements[one if isinstance(one, int) else mesh.axis(one)] = Shard(0)
    return mesh, placements


def permuted(at: Words, size: int, seed: int, epoch: int) -> Words:
    """Return the elements at the indices `at` of the permutation of `range(size)` given by seed and epoch.

    >>> sorted(permuted(np.arange(5, dtype=np.uint64), 5, seed=0, epoch=3).tolist())
    [0, 1, 2, 3, 4]
    """
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64).astype(np.uint64)
    found = _encrypted(at, half, keys)
    while (outside := found >= size).any():
        found[outside] = _encrypted(found[outside], half, keys)
    return found


def _encrypted(x: Words, half: np.uint64, keys: Words) -> Words:
    """Return a permutation of the numbers of `2 * half` bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << half) | right


def _mixed(x: Words) -> Words:
    """Return the hash of each number (splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
