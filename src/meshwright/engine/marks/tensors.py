"""Create, move and collect distributed tensors; signatures are as in `paddle.distributed`, terms as in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from meshwright.graph import OWN
from meshwright.layout import Placement, PlacementError, ProcessMesh, Spec, TorchValue, layout_of
from meshwright.tensor import (
    DistTensor,
    captured_whole,
    distribute,
    distribute_as,
    flush,
    from_local,
    full_tensor,
    local_parts,
    redistribute,
)

from .decision_record import note_reshard
from .default_mesh import resolve_mesh
from .stale_parameters import note_replacement


def shard_tensor(
    data: TorchValue,
    mesh: ProcessMesh | None = None,
    placements: Sequence[Placement] = (),
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    requires_grad: bool | None = None,
) -> DistTensor:
    """Distribute a tensor that every rank has whole: one placement per axis of `mesh`, padded with `Replicate()`.

    `data` may be anything that `torch.as_tensor` takes. A leaf stays a leaf, with its gradient, and an `nn.Parameter`
    stays a parameter. Use `reshard` to move a tensor within a computation.

    Raises:
        PlacementError: the tensor or the mesh cannot have a placement.

    >>> import meshwright as mw
    >>> mesh = mw.ProcessMesh([0, 1], ["tp"])
    >>> mw.simulate(lambda: mw.shard_tensor(torch.ones(4, 3), mesh, [mw.Shard(0)]).to_local().shape, 2)
    [torch.Size([2, 3]), torch.Size([2, 3])]
    """
    mesh = resolve_mesh(mesh)
    x = data if isinstance(data, Tensor) else torch.as_tensor(data, device=None)
    if (dtype is not None and dtype != x.dtype) or device is not None:
        x = x.to(device=device, dtype=dtype)
    out = _redistributed(x, mesh, placements) if isinstance(x, DistTensor) else distribute(x, mesh, check(placements))
    if out is not x:
        _take_gradient(x, out)
    if requires_grad is not None:
        out.requires_grad_(requires_grad)
    if isinstance(data, nn.Parameter) and out is not data:
        note_replacement(data, out)
        _take_over(data, out)
    return out


def _take_gradient(old: Tensor, new: DistTensor) -> None:
    """Give the leaf `new` the gradient of the leaf `old`, in the layout of a gradient of `new`.

    A captured tensor has no gradient.
    """
    if captured_whole(old) is not None:
        return
    if isinstance(old, DistTensor) and old.requires_grad:
        flush()  # its gradient may be pending
    with local_parts():
        found = old.is_leaf and new.is_leaf and old.grad is not None
    if found:
        assert old.grad is not None
        new.grad = distribute_as(old.grad.detach(), new.mesh, new.spec.dual().layout)


def _take_over(old: nn.Parameter, new: Tensor) -> None:
    """Give a parameter the attributes and the hooks of the parameter that it replaces."""
    for name, value in vars(old).items():
        if name not in OWN and name not in vars(new):
            setattr(new, name, value)
    for hook in (old._backward_hooks or {}).values():
        new.register_hook(vars(hook)["__wrapped__"] if isinstance(old, DistTensor) else hook)
    for hook in (old._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)


def _redistributed(x: DistTensor, mesh: ProcessMesh, placements: Sequence[Placement]) -> DistTensor:
    """Return a distributed `x` with other placements; a leaf stays a leaf."""
    if not x.is_leaf:
        return reshard(x, mesh, placements)
    with torch.no_grad():
        out = reshard(x.detach(), mesh, placements)
    if out.spec is x.spec:
        return x
    if isinstance(x, nn.Parameter):
        return nn.Parameter(out, x.requires_grad)  # pyright: ignore[reportReturnType] - made of a DistTensor, it is one
    out.requires_grad_(x.requires_grad)
    return out


def dtensor_from_local(
    local: Tensor, mesh: ProcessMesh | None, placements: Sequence[Placement], *, shape: Sequence[int] | None = None
) -> DistTensor:
    """Return the tensor of which `local` is this rank's part; no copy, no communication, differentiable.

    Pass the global `shape` if parts are uneven.

    Raises:
        LocalShapeError: the part does not fit the placements.

    >>> import meshwright as mw
    >>> mesh = mw.ProcessMesh([0, 1], ["dp"])
    >>> mw.simulate(lambda: mw.dtensor_from_local(torch.ones(3), mesh, [mw.Partial()]).sum().item(), 2)
    [6.0, 6.0]
    """
    return from_local(local, resolve_mesh(mesh), check(placements), shape)


def dtensor_from_fn(
    fn: Callable[..., Tensor],
    mesh: ProcessMesh | None,
    placements: Sequence[Placement],
    *args: object,
    **kwargs: object,
) -> DistTensor:
    """Return `fn(*args, **kwargs)` distributed over `mesh`, for a factory such as `torch.ones`.

    The numbers are those of one device.
    """
    return distribute(fn(*args, **kwargs), resolve_mesh(mesh), check(placements))


def reshard(x: Tensor, mesh: ProcessMesh | None = None, placements: Sequence[Placement] = ()) -> DistTensor:
    """Return `x` with other placements, or on a mesh of other ranks, size or shape; differentiable.

    Without `mesh`, `x` stays on its own mesh. Every rank of both meshes must make the call.
    """
    if not isinstance(x, DistTensor):
        return distribute(x, resolve_mesh(mesh), check(placements))
    target = resolve_mesh(mesh if mesh is not None else x.mesh)
    layout = layout_of(check(placements), x.ndim, target)
    note_reshard(x.spec, Spec(target, layout, x.spec.shape, x.spec.dtype))
    return redistribute(x, target, layout)


def unshard_dtensor(x: Tensor) -> Tensor:
    """Return the whole value as a plain tensor on every rank of the world; a plain tensor is returned as it is."""
    return full_tensor(x)


def check(placements: Sequence[Placement]) -> Sequence[Placement]:
    """Return `placements` if it is a list. Raises PlacementError for a single placement or anything else."""
    if isinstance(placements, (list, tuple)):
        return placements
    raise PlacementError(
        f"placements {placements!r}",
        f"a {type(placements).__name__}",
        "placements are a list with one placement per mesh axis",
        f"pass [{placements!r}]" if isinstance(placements, Placement) else "pass [mw.Shard(0), mw.Replicate()]",
    )
