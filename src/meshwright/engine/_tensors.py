"""Making, moving and collecting distributed tensors; signatures as in `paddle.distributed`, words as in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import Placement, PlacementError, ProcessMesh, layout_of
from meshwright.tensor import DistTensor, distribute, from_local, redistribute, whole

from ._mesh import resolve_mesh


def shard_tensor(
    data: Any,
    mesh: ProcessMesh | None = None,
    placements: Sequence[Placement] = (),
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool | None = None,
) -> DistTensor:
    """A tensor that every rank has whole, laid over `mesh`: one placement per mesh axis, padded with `Replicate()`.

    `data` may be anything `torch.as_tensor` takes. A leaf stays a leaf and an `nn.Parameter` a parameter. Raises
    PlacementError for a placement that the tensor or the mesh cannot have.

    >>> import meshwright as mw
    >>> mesh = mw.ProcessMesh([0, 1], ["tp"])
    >>> mw.simulate(lambda: mw.shard_tensor(torch.ones(4, 3), mesh, [mw.Shard(0)]).to_local().shape, 2)
    [torch.Size([2, 3]), torch.Size([2, 3])]
    """
    mesh = resolve_mesh(mesh)
    x = data if isinstance(data, Tensor) else torch.as_tensor(data)
    if (dtype is not None and dtype != x.dtype) or device is not None:
        x = x.to(device=device, dtype=dtype)
    out = distribute(x, mesh, placements)
    return out if requires_grad is None else out.requires_grad_(requires_grad)  # pyright: ignore[reportReturnType]


def dtensor_from_local(
    local: Tensor, mesh: ProcessMesh | None, placements: Sequence[Placement], *, shape: Sequence[int] | None = None
) -> DistTensor:
    """The tensor of which `local` is this rank's part; no copy, no communication, differentiable.

    Give `shape`, the global shape, when parts are uneven. Raises LocalShapeError for a part that does not fit.
    """
    return from_local(local, resolve_mesh(mesh), placements, shape)


def dtensor_from_fn(
    fn: Callable[..., Tensor], mesh: ProcessMesh | None, placements: Sequence[Placement], *args: Any, **kwargs: Any
) -> DistTensor:
    """`fn(*args, **kwargs)`, a factory such as `torch.ones`, laid over `mesh`."""
    return distribute(fn(*args, **kwargs), resolve_mesh(mesh), placements)


def reshard(x: Tensor, mesh: ProcessMesh | None = None, placements: Sequence[Placement] = ()) -> DistTensor:
    """`x` under other placements, or on a mesh of other ranks, size or shape; differentiable.

    Without `mesh` it stays on its own. Every rank of both meshes has to make the call.
    """
    if not isinstance(x, DistTensor):
        return distribute(x, resolve_mesh(mesh), placements)
    target = mesh if mesh is not None else x.mesh
    return redistribute(x, target, layout_of(placements, x.ndim, target))


def unshard_dtensor(x: Tensor) -> Tensor:
    """The whole value as a plain tensor on every rank of the world; a plain tensor is returned as it is."""
    return whole(x)


def check_placements(placements: Any) -> None:
    """Raises PlacementError when `placements` is not a list of placements."""
    if isinstance(placements, Placement):
        raise PlacementError(
            f"placements {placements!r}", "one placement", "there is a list, with one placement per mesh axis", f"[{placements!r}]"
        )
