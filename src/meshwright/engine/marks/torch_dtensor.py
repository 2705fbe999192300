"""Convert to torch's own DTensor and back, without a copy, for layouts that both can express."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

import torch.distributed as dist

from meshwright.layout import Partial, Placement, ProcessMesh, Replicate, Shard, Spec, TorchValue, layout_of
from meshwright.tensor import DistTensor, redistribute

from .._errors import TorchDTensorError
from .tensors import dtensor_from_local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_OPS = {"sum": "sum", "avg": "avg", "max": "max", "min": "min", "prod": "product"}
"""The operation of a pending reduction: our name → torch's name."""
_BACK = {theirs: ours for ours, theirs in _OPS.items()}


def _torch() -> TorchValue:
    """Return torch.distributed.tensor, imported at first use because the import is as slow as that of torch."""
    return import_module("torch.distributed.tensor")


def to_torch_dtensor(x: DistTensor, device_mesh: DeviceMesh | None = None) -> DTensor:
    """Return `x` as a `torch.distributed.tensor.DTensor`: the same memory, no communication, differentiable.

    Every rank of the world makes the call, because it creates a DeviceMesh of process groups, unless `device_mesh` is
    given.

    Raises:
        TorchDTensorError: DTensor cannot express the layout (a dim that is a product of factors, axes that shard a dim
            in another order than the mesh's, pending `any` and `all`), or torch.distributed is not initialized.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise TorchDTensorError(
            f"{x.spec!r} as torch's DTensor",
            "no torch.distributed process group",
            "a DTensor needs process groups; simulated ranks have none",
            "call torch.distributed.init_process_group() on every process of the run, or use mw.unshard_dtensor(x)",
        )
    placements = [_to_torch(x.spec, p) for p in x.placements]
    _check_order(x.spec)
    x = redistribute(x, x.mesh, x.spec.layout.with_varying(()))
    on = device_mesh if device_mesh is not None else _device_mesh(x.mesh, x.device.type, dist.group.WORLD)
    return _torch().DTensor.from_local(
        x.to_local(), on, placements, run_check=False, shape=x.shape, stride=tuple(x.stride())
    )


def from_torch_dtensor(x: DTensor) -> DistTensor:
    """Return torch's DTensor as a distributed tensor: the same memory, no communication, differentiable.

    Raises:
        TorchDTensorError: a placement is none of `Shard`, `Replicate` and `Partial`.
    """
    on = x.device_mesh
    mesh = ProcessMesh(on.mesh.tolist(), on.mesh_dim_names)
    placements = [_from_torch(x, p) for p in x.placements]
    like = [_torch().Replicate() if p.is_partial() else p for p in x.placements]
    return dtensor_from_local(x.to_local(grad_placements=like), mesh, placements, shape=tuple(x.shape))


@lru_cache(maxsize=256)
def _device_mesh(mesh: ProcessMesh, device: str, world: object) -> DeviceMesh:
    """Return the DeviceMesh of the same ranks, created once per `world`."""
    return _torch().DeviceMesh(device, mesh.mesh.tolist(), mesh_dim_names=mesh.dim_names)


def _check_order(spec: Spec) -> None:
    """Raise TorchDTensorError if the placements do not express the whole layout."""
    said = layout_of(spec.placements, spec.ndim, spec.mesh)
    if said.dims == spec.layout.dims:
        return
    order, product = "axes that shard a dim in another order than the mesh's", "a dim that is a product of factors"
    found = order if spec.layout.is_simple else product
    raise _unsayable(spec, found, "call mw.reshard(x, placements=x.placements) first, which changes the order")


def _to_torch(spec: Spec, placement: Placement) -> TorchValue:
    if isinstance(placement, Shard):
        return _torch().Shard(placement.dim)
    if not isinstance(placement, Partial):
        return _torch().Replicate()
    if placement.op not in _OPS:
        raise _unsayable(
            spec, f"a pending reduction by {placement.op}", "call mw.reshard(x) first, which does the reduction"
        )
    return _torch().Partial(_OPS[placement.op])


def _unsayable(spec: Spec, found: str, write: str) -> TorchDTensorError:
    return TorchDTensorError(f"{spec!r} as torch's DTensor", found, "DTensor cannot express it", write)


def _from_torch(x: DTensor, placement: TorchValue) -> Placement:
    if type(placement) is _torch().Shard:
        return Shard(placement.dim)
    if type(placement) is _torch().Replicate:
        return Replicate()
    if type(placement) is _torch().Partial and placement.reduce_op in _BACK:
        return Partial(_BACK[placement.reduce_op])
    raise TorchDTensorError(
        f"torch's DTensor with placements {list(x.placements)}",
        f"{placement!r}",
        "the placement is private to torch, or its reduction is unknown",
        "call x.redistribute(placements=…) with Shard, Replicate and Partial first",
    )
