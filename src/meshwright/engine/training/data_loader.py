"""Shard the batches of a data loader over meshes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint import current_world, decode_value, encode_value
from meshwright.comm import current_communicator
from meshwright.layout import Placement, ProcessMesh, Spec, TorchValue, layout_of
from meshwright.tensor import map_tensors, number_by_values

from .._errors import BatchError
from ..marks.tensors import dtensor_from_local, shard_tensor
from .sampler import Axis, GlobalSampler, StepSamples, target

Target = tuple[ProcessMesh, list[Placement]]
"""A mesh, and the placements of a batch's rows on it."""


def shard_dataloader(
    dataloader: Iterable[Any],
    meshes: ProcessMesh | Sequence[ProcessMesh],
    shard_dims: Axis | Sequence[Axis] = None,
    input_keys: Sequence[str] | None = None,
    is_dataset_splitted: bool = False,
) -> ShardDataLoader:
    """Return `dataloader` with its tensors distributed over `meshes`, sharded along the mesh axis `shard_dims`.

    The loader is any iterable of tensors, tuples, lists or dicts, nested or not. Every rank iterates over the same
    global batches and keeps its part. Batches that differ between processes are an error at the first collective. With
    `is_dataset_splitted` the loader yields each rank's own part along that axis. These parts have one size, or the
    sizes that a `GlobalSampler` with an axis gives. For one mesh, `shard_dims` may be a tuple of axes. With several
    meshes, the first input goes to the first mesh and so on; inputs of a dict are counted in the order of `input_keys`.

    Raises:
        BatchError: a batch does not fit the meshes.
    """
    many = list(meshes) if isinstance(meshes, Sequence) else [meshes]
    each = isinstance(shard_dims, list) or (isinstance(shard_dims, tuple) and isinstance(meshes, Sequence))
    dims: list[Any] = list(shard_dims) if each else [shard_dims] * len(many)  # pyright: ignore[reportArgumentType] - by `each`
    if len(dims) != len(many):
        raise BatchError(
            f"shard_dims {dims}",
            f"{len(many)} meshes",
            "each mesh needs one axis along which its inputs are sharded",
            "pass one axis for all meshes, or a list with one axis per mesh",
        )
    targets = [target(mesh, dim) for mesh, dim in zip(many, dims, strict=True)]
    return ShardDataLoader(dataloader, targets, input_keys, is_dataset_splitted)


class ShardDataLoader:
    """A data loader that yields distributed batches, made by `shard_dataloader`.

    Its `state_dict` has the place after the batches that were yielded: the place of its `GlobalSampler`, also if the
    loader prefetches, or the place of the loader itself. Loaders that each rank splits by itself may have one place per
    part.
    """

    def __init__(
        self,
        dataloader: Iterable[Any],
        targets: Sequence[Target],
        input_keys: Sequence[str] | None,
        splitted: bool,
    ) -> None:
        self.dataloader = dataloader
        self.sampler = _sampler_of(dataloader)
        """The sampler by global index that the loader was given, or None."""
        self._targets, self._keys, self._splitted = list(targets), input_keys, splitted
        self._check_sampler()

    def __len__(self) -> int:
        return len(self.dataloader)  # pyright: ignore[reportArgumentType] - TypeError where it has none

    def __iter__(self) -> Iterator[Any]:
        sampler = self.sampler
        if sampler is None:
            for batch in self.dataloader:
                yield self._distributed_batch(batch, None)
            return
        steps = sampler.steps(sampler.place)
        with torch.random.fork_rng(devices=[]):  # a loader draws a seed, and a resumed run draws it again
            batches = iter(self.dataloader)
        for rows, batch in zip(steps, batches, strict=False):
            sampler.place = rows.behind  # the loader may have fetched more
            yield self._distributed_batch(batch, rows if self._splitted else None)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data; every rank calls it."""
        loader = self._keeper
        if loader is self.sampler:
            return loader.state_dict()
        if not self._splitted:
            return loader.state_dict()
        told = current_world().gathered([self._part[0], encode_value("the place in the data", loader.state_dict())])
        by_part: dict[int, Any] = {part: decode_value(state) for part, state in reversed(told)}
        return {"parts": [by_part[part] for part in sorted(by_part)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batches that were yielded before the state was saved; every rank calls it.

        Raises:
            BatchError: the data set was in another number of parts.
        """
        loader = self._keeper
        if loader is self.sampler:
            loader.load_state_dict(state)
            return
        part, parts = self._part
        if self._splitted and len(state["parts"]) != parts:
            raise BatchError(
                f"resuming a data set in {parts} parts",
                f"positions in {len(state['parts'])} parts",
                "other parts hold other samples, so some would be seen twice and some never",
                "use mw.GlobalSampler, whose position is valid for any number of ranks",
            )
        loader.load_state_dict(state["parts"][part] if self._splitted else state)

    @property
    def _part(self) -> tuple[int, int]:
        """Return the number of the part that this rank reads, and the number of parts."""
        mesh, placements = self._targets[0]
        axes = [axis for axis, placed in zip(mesh.dim_names, placements, strict=True) if placed.is_shard()]
        here = current_communicator()
        place = here.place(mesh, axes) if here.rank in mesh else 0
        return place, prod(mesh.sizes[axis] for axis in axes)

    @property
    def _keeper(self) -> Any:
        """Return the object that has the place: the sampler by global index, or the loader.

        Raises:
            BatchError: that object has no `state_dict`.
        """
        keeper = self.sampler if self.sampler is not None else self.dataloader
        if not hasattr(keeper, "state_dict"):
            raise BatchError(
                "the position in a loader's data",
                f"a {type(keeper).__name__} without state_dict",
                "nothing records which samples the loader yielded",
                "write DataLoader(data, batch_sampler=mw.GlobalSampler(data, batch))",
            )
        return keeper

    def _check_sampler(self) -> None:
        """Raise BatchError if the sampler reads other rows for this rank than its layout has."""
        sampler = self.sampler
        if sampler is None or not (sampler.is_split or self._splitted):
            return
        self._splitted = True
        if sampler.target is None or not all(self._agrees(sampler.target, here) for here in self._targets):
            found = "whole batches" if sampler.target is None else f"rows along {_written(sampler.target)}"
            raise BatchError(
                f"parts of batches along {', '.join(map(_written, self._targets))}",
                f"a sampler that yields {found}",
                "each rank must read exactly the rows of its shard",
                "use mw.GlobalSampler(data, batch, mesh=mesh, axis=axis), and shard_dataloader with that mesh and axis",
            )

    def _agrees(self, one: Target, other: Target) -> bool:
        rank, count = current_communicator().rank, one[0].size * other[0].size
        if rank not in other[0]:
            return True
        return rank in one[0] and _rows(one, count, rank) == _rows(other, count, rank)

    def _distributed_batch(self, batch: TorchValue, rows: StepSamples | None) -> TorchValue:
        """Return the distributed batch. If there are several meshes, each input is put on its own mesh."""
        if len(self._targets) == 1:
            return self._distributed_input(batch, 0, rows)
        if isinstance(batch, Mapping):
            order = self._order(batch)
            return {key: self._distributed_input(value, order.index(key), rows) for key, value in batch.items()}
        self._check(batch, len(batch) if isinstance(batch, (list, tuple)) else 1)
        laid = [self._distributed_input(value, at, rows) for at, value in enumerate(batch)]
        return type(batch)(*laid) if hasattr(batch, "_fields") else type(batch)(laid)

    def _order(self, batch: Mapping[str, Any]) -> list[str]:
        order = list(self._keys if self._keys is not None else batch)
        if sorted(order) != sorted(batch):
            raise BatchError(
                f"input_keys {order}",
                f"a batch with the keys {list(batch)}",
                "each input needs a mesh",
                f"pass input_keys={list(batch)}, in the order of the meshes",
            )
        self._check(batch, len(order))
        return order

    def _check(self, batch: object, count: int) -> None:
        if count != len(self._targets):
            raise BatchError(
                f"a batch over {len(self._targets)} meshes",
                f"a {type(batch).__name__} of {count} inputs",
                "each input needs a mesh",
                "pass one mesh for all inputs, or a list with one mesh per input",
            )

    def _distributed_input(self, value: TorchValue, at: int, rows: StepSamples | None) -> TorchValue:
        mesh, placements = self._targets[at]

        def lay(x: Tensor) -> Tensor:
            if not x.dim():
                return shard_tensor(x, mesh, [])
            if not self._splitted:
                whole = shard_tensor(x, mesh, placements)
                number_by_values(whole)
                return whole
            if rows is None or self.sampler is None:
                return dtensor_from_local(x, mesh, placements)
            mine = x[: self.sampler.part(rows)[1]]  # a rank without rows has read one row, for the shapes
            return dtensor_from_local(mine, mesh, placements, shape=(rows.count, *x.shape[1:]))

        return map_tensors(lay, value)


def _sampler_of(loader: object) -> GlobalSampler | None:
    found = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    return next((sampler for sampler in found if isinstance(sampler, GlobalSampler)), None)


def _rows(where: Target, count: int, rank: int) -> tuple[int, int]:
    mesh, placements = where
    return Spec(mesh, layout_of(placements, 1, mesh), (count,), torch.int64).local_ranges(rank)[0]


def _written(where: Target) -> str:
    mesh, placements = where
    axes = [axis for axis, placed in zip(mesh.dim_names, placements, strict=True) if placed.is_shard()]
    return f"{' and '.join(map(repr, axes)) or 'no axis'} of {mesh!r}"
