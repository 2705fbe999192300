"""Construction of distributed tensors, their conversion, and the way back to plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.comm import current_communicator
from meshwright.layout import Layout, Placement, PlacementError, ProcessMesh, Spec, layout_of
from meshwright.reshard import away_part

from .._errors import LocalShapeError, OperationError
from ..core.absent_tensor import absent, make_absent
from ..core.capture_marks import captured_whole
from ..core.computation_numbers import collectives_of_call, pass_number, with_new_number
from ..core.dist_tensor import DistTensor, as_part, plain_view
from ..core.other_libraries import check_library
from ..core.rank_ownership import check_maker, mark_maker
from ..torch_hooks import (
    has_tangent,
    no_interception,
    outside_transforms,
    shares_storage,
    transforming,
    transforms_paused,
)
from .convert import arranged, convert_local
from .local_parts import spec_of_whole
from .python_values import gather_everywhere
from .same_parts import check_same_on_ranks


def distribute(x: Tensor, mesh: ProcessMesh, placements: Sequence[Placement]) -> DistTensor:
    """Distribute `x`, which every rank holds whole, over `mesh`; each rank keeps its part.

    A leaf that requires a gradient becomes one; an `nn.Parameter` stays one. A distributed `x` is resharded.
    """
    return distribute_as(x, mesh, layout_of(placements, x.ndim, mesh))


def distribute_as(x: Tensor, mesh: ProcessMesh, layout: Layout) -> DistTensor:
    """Do the same as `distribute` for a layout, which also determines the order of the axes that shard a dim.

    Raises:
        PlacementError: `x` is a parameter, and the layout has a pending reduction.
    """
    if isinstance(x, DistTensor):
        return redistribute(x, mesh, layout)
    if transforming():
        return _placed_outside(x, mesh, layout)
    note = captured_whole(x)
    if note is not None:
        return note(ReshardMark(mesh, layout), (x,), lambda: x.view_as(x))
    if layout.partial and isinstance(x, nn.Parameter):
        raise _pending_parameter(x, layout)
    src = spec_of_whole(x, mesh)
    return _placed(x, src, Spec(mesh, layout, src.shape, src.dtype, src.new.strides))


def _pending_parameter(x: Tensor, layout: Layout) -> PlacementError:
    """Return the error for a parameter of which ranks hold terms."""
    return PlacementError(
        f"mw.shard_tensor of a parameter of shape {tuple(x.shape)}",
        f"the layout {layout!r}, a pending reduction",
        "an optimizer would apply the whole gradient to each rank's term",
        "use mw.Shard(dim) or mw.Replicate() for a parameter; operators make mw.Partial() results themselves",
    )


def _placed_outside(x: Tensor, mesh: ProcessMesh, layout: Layout) -> DistTensor:
    """Return `distribute_as` of a plain tensor, called inside a transform of `torch.func`.

    Raises OperationError for a batch of tensors, or a tensor that depends on the differentiated variable.
    """
    plain = outside_transforms(x)
    if plain is None:
        raise OperationError(
            "mw.shard_tensor inside a transform of torch.func",
            f"a tensor of shape {tuple(x.shape)} of the transform",
            "inside a transform, torch wraps tensors, and a wrapped tensor cannot be split",
            "call mw.shard_tensor outside and pass the distributed tensor to the transformed function; in a pipeline, "
            "transform a function that calls the layers of one stage only",
        )
    with transforms_paused():
        return distribute_as(plain, mesh, layout)


def _placed(x: Tensor, src: Spec, dst: Spec) -> DistTensor:
    """Return the plain tensor `x` in the layout and with the strides of `dst`."""
    check_library(f"to distribute a tensor of shape {tuple(x.shape)}", "", (x,))
    mesh = dst.mesh
    if (not x.is_leaf and x.requires_grad) or has_tangent(x):
        return as_dist_tensor(convert_local(x, src, dst) if current_communicator().rank in mesh else x, dst)
    with torch.no_grad():
        local = x.detach()
        local = convert_local(local, src, dst) if current_communicator().rank in mesh else local
        local = local.clone() if shares_storage(local, x) and isinstance(x, nn.Parameter) else local
    out = with_new_number(_present(plain_view(local), dst), x)
    with no_interception():
        out.requires_grad_(x.requires_grad)
    if isinstance(x, nn.Parameter):
        out._is_param = True
    return out


def keep_own_part(x: Tensor, spec: Spec) -> DistTensor:
    """Return `x` itself, a leaf that every rank holds whole, reduced to this rank's part.

    The object stays the same, so modules and optimizers that hold the leaf hold the part.
    """
    spec = spec.new
    if isinstance(x, DistTensor):
        check_maker(x, "mw.shard_layer")
    whole = not isinstance(x, DistTensor)
    new = _placed(x, spec_of_whole(x, spec.mesh), spec) if whole else _resharded(x, spec)
    is_parameter = isinstance(x, nn.Parameter)
    with no_interception():
        x.data = plain_view(new.detach())
    out = absent(x, spec) if new._away else as_part(x, spec)
    pass_number(new, out)
    if new._away:
        return out
    mark_maker(out)
    if is_parameter:
        out._is_param = True
    return out


def as_dist_tensor(local: Tensor, spec: Spec) -> DistTensor:
    """Return the distributed tensor with this local part; differentiable.

    A rank outside the mesh holds no part. A part is copied if its memory format differs from that of a new tensor.
    """
    return with_new_number(_present(local, spec))


def _present(local: Tensor, spec: Spec) -> DistTensor:
    spec = spec.new
    with no_interception():
        if current_communicator().rank in spec.mesh:
            local = arranged(local, spec)
            out = as_part(local if type(local) is Tensor and local._base is None else local.view_as(local), spec)
            mark_maker(out)
            return out
        if local.requires_grad or has_tangent(local):
            return make_absent([spec], [local])[0]
        return absent(away_part(spec.local_shape(current_communicator().rank), spec.dtype, local.device), spec)


def from_local(
    local: Tensor, mesh: ProcessMesh, placements: Sequence[Placement], shape: Sequence[int] | None = None
) -> DistTensor:
    """Return the distributed tensor of which `local` is this rank's part; differentiable.

    The tensor is contiguous, and shares memory with `local` if `local` is contiguous too. Without `shape`, the parts of
    all ranks must have the shape of `local`. Raises LocalShapeError when `local` does not fit.
    """
    if captured_whole(local) is not None:
        raise OperationError(
            "dtensor_from_local in a model that is captured",
            f"a tensor of shape {tuple(local.shape)}",
            "a model is captured as for one device, so parts do not exist yet",
            "use mw.local_map or a LocalLayer",
        )
    layout = layout_of(placements, local.dim(), mesh)
    rank = current_communicator().rank
    spec = Spec(mesh, layout, shape if shape is not None else _grown(local.shape, layout, mesh), local.dtype)
    if rank in mesh and tuple(local.shape) != spec.local_shape(rank):
        raise LocalShapeError(
            f"from_local of a part of shape {tuple(local.shape)} on rank {rank}",
            f"{spec!r} on {mesh!r}",
            f"rank {rank} holds a part of shape {spec.local_shape(rank)}",
            "pass shape=(…), the global shape, if parts are uneven",
        )
    if shape is None:
        check_same_on_ranks(spec)
    with no_interception():
        return as_dist_tensor(local.view_as(local), spec)


def _grown(shape: Sequence[int], layout: Layout, mesh: ProcessMesh) -> list[int]:
    sizes = list(shape)
    for d, axes in enumerate(layout.dims):
        for axis in axes if isinstance(axes, tuple) else ():
            sizes[d] *= mesh.sizes[axis]
    return sizes


def redistribute(x: DistTensor, mesh: ProcessMesh, layout: Layout) -> DistTensor:
    """Return `x` on `mesh` under `layout`; differentiable, and outside of any transform of `torch.func`."""
    check_maker(x, "mw.shard_tensor or mw.reshard")
    have = x._spec.new
    return _resharded(x, Spec(mesh, layout, have.shape, have.dtype, have.strides))


def _resharded(x: DistTensor, dst: Spec) -> DistTensor:
    """Return `x` under another spec of the same shape."""
    if dst is x._spec:
        return x
    if transforming():
        with transforms_paused():
            return _resharded(x, dst)
    x._read_again()
    rank, mesh = current_communicator().rank, dst.mesh
    if rank not in x._spec.mesh and rank not in mesh:
        outside = make_absent([dst], [x])[0]
        pass_number(x, outside)
        return outside
    with collectives_of_call("reshard", [x]):
        local = convert_local(x, x._spec, dst)
    with no_interception():
        out = local.view_as(local) if isinstance(local, DistTensor) else local
        found = as_part(out, dst) if rank in mesh else absent(out, dst)
    pass_number(x, found)
    return found


@dataclass(frozen=True, slots=True)
class ReshardMark:
    """`mw.reshard(x, mesh, placements)` as an operator of a captured program."""

    mesh: ProcessMesh
    layout: Layout

    def __call__(self, x: Tensor) -> DistTensor:
        return distribute_as(x, self.mesh, self.layout)

    def __repr__(self) -> str:
        return f"reshard to {self.layout!r} on {self.mesh!r}"


@dataclass(frozen=True, slots=True, repr=False)
class StageArrival(ReshardMark):
    """A value arrives at the stage of a layer.

    From a mesh with the same axes it arrives in its own layout, else in the given one.
    """


STAGE_SPLIT = torch.ops.aten.alias.default
"""Operator for `pipe_split` in a captured program."""


def pipe_split(x: Tensor) -> Tensor:
    """Return `x`.

    In a pipeline, the values computed from it belong to the next chunk of the model, even on the same mesh.

    When a value moves to another mesh, the next chunk begins without this function. Use it for placements in which two
    consecutive chunks are on one mesh, such as the turn of a V.
    """
    note = captured_whole(x)
    return x if note is None else note(STAGE_SPLIT, (x,), lambda: x.view_as(x))


def full_tensor(x: Tensor) -> Tensor:
    """Return the whole value of `x` as a plain tensor on every rank of the world; differentiable within its mesh.

    It has the memory order of one device.
    """
    if isinstance(x, DistTensor):
        check_maker(x, "mw.unshard_dtensor")
    out = gather_everywhere(x)
    if not isinstance(x, DistTensor) or x._spec.new.order is None:
        return out
    with no_interception():
        return arranged(out, x._spec)
