"""Batches of a data loader, laid over meshes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshwright.layout import MeshError, Placement, ProcessMesh, Replicate, Shard
from meshwright.tensor import map_tensors

from ._errors import BatchError
from ._mesh import resolve_mesh
from ._tensors import dtensor_from_local, shard_tensor

Axis = str | int | None
"""The mesh axis over which a batch is split: its name, its position, or None for none."""


def shard_dataloader(
    dataloader: Iterable[Any],
    meshes: ProcessMesh | Sequence[ProcessMesh],
    shard_dims: Axis | Sequence[Axis] = None,
    input_keys: Sequence[str] | None = None,
    is_dataset_splitted: bool = False,
) -> ShardDataLoader:
    """`dataloader` whose tensors are laid over `meshes`, split along the mesh axis `shard_dims`.

    It is any iterable of tensors, tuples, lists or dicts, nested as they may be. Every rank iterates over the same
    global batches and keeps its part; with `is_dataset_splitted` the loader gives each rank's own part along that
    axis, all of one size. With several meshes, the first input goes to the first mesh and so on; inputs of a dict
    are counted in the order of `input_keys`. Raises BatchError for a batch that does not fit the meshes.
    """
    many = list(meshes) if isinstance(meshes, Sequence) else [meshes]
    dims = list(shard_dims) if isinstance(shard_dims, (list, tuple)) else [shard_dims] * len(many)
    if len(dims) != len(many):
        raise BatchError(
            f"shard_dims {dims}", f"{len(many)} meshes", "each mesh has one axis over which its inputs are split",
            "one axis for all meshes, or a list of one per mesh",
        )  # fmt: skip
    targets = [_target(mesh, dim) for mesh, dim in zip(many, dims, strict=True)]
    return ShardDataLoader(dataloader, targets, input_keys, is_dataset_splitted)


def _target(mesh: ProcessMesh, dim: Any) -> tuple[ProcessMesh, list[Placement]]:
    mesh = resolve_mesh(mesh)
    placements: list[Placement] = [Replicate()] * mesh.ndim
    if isinstance(dim, int) and not -mesh.ndim <= dim < mesh.ndim:
        raise MeshError(f"shard_dims {dim}", repr(mesh), f"there is no axis {dim}", f"one of {list(mesh.dim_names)}")
    if dim is not None:
        placements[dim if isinstance(dim, int) else mesh.axis(dim)] = Shard(0)
    return mesh, placements


class ShardDataLoader:
    """What `shard_dataloader` gives: iterate over it as over the loader it was made of."""

    def __init__(
        self,
        dataloader: Iterable[Any],
        targets: Sequence[tuple[ProcessMesh, list[Placement]]],
        input_keys: Sequence[str] | None,
        splitted: bool,
    ) -> None:
        self.dataloader = dataloader
        self._targets, self._keys, self._splitted = list(targets), input_keys, splitted

    def __len__(self) -> int:
        return len(self.dataloader)  # pyright: ignore[reportArgumentType] - TypeError where it has none

    def __iter__(self) -> Iterator[Any]:
        for batch in self.dataloader:
            yield self._laid(batch)

    def _laid(self, batch: Any) -> Any:
        """The batch; its inputs go to the meshes one by one when there are several."""
        if len(self._targets) == 1:
            return self._on(batch, 0)
        if isinstance(batch, Mapping):
            order = self._order(batch)
            return {key: self._on(value, order.index(key)) for key, value in batch.items()}
        self._check(batch, len(batch) if isinstance(batch, (list, tuple)) else 1)
        laid = [self._on(value, at) for at, value in enumerate(batch)]
        return type(batch)(*laid) if hasattr(batch, "_fields") else type(batch)(laid)

    def _order(self, batch: Mapping[str, Any]) -> list[str]:
        order = list(self._keys if self._keys is not None else batch)
        if sorted(order) != sorted(batch):
            raise BatchError(
                f"input_keys {order}", f"a batch with the keys {list(batch)}", "each input needs a mesh",
                f"input_keys={list(batch)}, in the order of the meshes",
            )  # fmt: skip
        self._check(batch, len(order))
        return order

    def _check(self, batch: Any, count: int) -> None:
        if count != len(self._targets):
            raise BatchError(
                f"a batch over {len(self._targets)} meshes", f"a {type(batch).__name__} of {count} inputs",
                "each input needs a mesh", "one mesh for all inputs, or a list of one per input",
            )  # fmt: skip

    def _on(self, value: Any, at: int) -> Any:
        mesh, placements = self._targets[at]
        lay = dtensor_from_local if self._splitted else shard_tensor
        return map_tensors(lambda x: lay(x, mesh, placements) if x.dim() else shard_tensor(x, mesh, []), value)
