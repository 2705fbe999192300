"""Memory that a tensor takes over by `x.data = new`.

The layout of `x` stays. There are three cases for the parts of this rank:

    `new` is a temporary       `x` gets the converted value: no other code can read or write the memory of `new`
    the same parts             `x` and `new` share the local memory, as on one device
    other parts                `x` becomes a view of the memory of `new`, which is read again and written back

The view ends with the first write to `x` after all other users of the memory are gone. All ranks have to agree on that,
because a write to a view is collective.
"""

from __future__ import annotations

import sys
import threading
from typing import TypeGuard
from weakref import ref

import torch
from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.layout import Partial, ProcessMesh, Spec, TorchValue, layout_of, replicated

from .._errors import MemoryAccessError
from ..conversion.convert import convert_local, move
from ..conversion.distribute import distribute_as
from ..core.dist_tensor import DistTensor, as_part, plain_view
from ..core.write_counts import note_counter
from ..torch_hooks import FakeTensor, backward_running, is_dense, no_interception, shares_storage, tensors_on_storage
from .dist_view import (
    DistView,
    become_view,
    before_call,
    detached_view,
    end_outer_view,
    in_order,
    inner_view,
    leave_memory,
)
from .view_origin import ViewOrigin

_T: TorchValue = Tensor


class _State(threading.local):
    """The tensors of a rank that took over memory as views; simulated ranks are threads."""

    def __init__(self) -> None:
        self.views: dict[int, ref[Tensor]] = {}


_state = _State()

_CALLS = 2
"""References to an otherwise unreferenced argument, beside those of one function: the caller's and a setter's."""


def _references(x: object) -> int:
    """Return the references to an otherwise unreferenced argument: one more while TorchDynamo runs functions."""
    return sys.getrefcount(x)


def is_temporary(new: Tensor) -> bool:
    """True if only the caller's expression refers to `new`, and only `new` uses its memory; for a property's setter."""
    if sys.getrefcount(new) > _CALLS + _references(object()) or type(new) is DistView or isinstance(new, FakeTensor):
        return False
    if sys.version_info >= (3, 14) and any(v is new for v in sys._getframe(2).f_locals.values()):
        return False  # a local variable is passed without its own reference
    with no_interception():
        return is_dense(new) and tensors_on_storage(new) == 1


def is_on_other_mesh(new: TorchValue, x: DistTensor) -> TypeGuard[DistTensor]:
    """True if `new` is a tensor of another mesh, such as one of another pipeline stage."""
    return isinstance(new, DistTensor) and new._spec.mesh is not x._spec.mesh and not isinstance(new, FakeTensor)


def from_other_mesh(x: DistTensor, new: DistTensor, spec: Spec, is_alone: bool, asked: str) -> DistTensor:
    """Return the values of `new`, a temporary on another mesh, in the layout `spec` on the mesh of `x`.

    `is_alone` is the answer of `is_temporary`. A rank without a part of `new` cannot answer it, so all ranks of both
    meshes agree.

    Raises:
        MemoryAccessError: other code may use the memory of `new`; raised on all ranks of both meshes.
    """
    here = current_communicator()
    group = tuple(sorted({*x._spec.mesh.process_ids, *new._spec.mesh.process_ids}))
    if here.rank in group and here.any_true(not is_alone, group):
        raise _mesh_error(x, f"y is {new._spec!r} on {new._spec.mesh!r}", asked)
    with torch.no_grad():
        return distribute_as(new.detach(), x._spec.mesh, spec.layout)


def put_data(x: DistTensor, new: Tensor, have: Spec, need: Spec) -> None:
    """Carry out `x.data = new` for `new` with the spec `have`; `x` gets the spec `need`."""
    same = _same_parts(have, need)
    if same:
        need = Spec(need.mesh, need.layout, need.shape, need.dtype, have.strides)
    if same or x._away or isinstance(x, FakeTensor):
        return _move_to(x, new if same else convert_local(new, have, need), need, new)
    _check_mesh(x, new, have, need)
    need = Spec(need.mesh, need.layout, need.shape, need.dtype, have.strides)
    with torch.no_grad():
        base = _base_for(new, have)
        local = convert_local(base, have, need)
    with no_interception():
        local = in_order(local.clone() if shares_storage(local, base) else local, need)
    _move_to(x, local, need, None)
    alias = torch.ops.aten.alias.default
    source = ViewOrigin(
        base, alias, (base,), {}, 0, 0, counted=isinstance(new, DistTensor), tracked=False, ends=_is_only_user
    )
    view = become_view(x, source)
    view._seen = view._counted = False
    register(view)


def _same_parts(have: Spec, need: Spec) -> bool:
    """True if every rank has the same part under both specs."""
    if have.mesh is not need.mesh:
        return False
    how = move(have, have.with_layout(need.layout))
    return how.is_trivial or (how.is_relabel and not how.special)


def _move_to(x: DistTensor, local: Tensor, spec: Spec, shared: Tensor | None) -> None:
    """Give `x` the memory of the local part `local`; of the same view, if `shared` is a view."""
    leave_memory(x)
    with no_interception():
        _T.data.__set__(x, plain_view(local))
        note_counter(local, x)
    vars(x).pop("_shared", None)
    x._spec = spec
    if isinstance(shared, DistView) and not x._away:
        register(inner_view(x, shared))


def _base_for(new: Tensor, have: Spec) -> DistTensor:
    """Return `new.data`, which keeps the memory when `new` moves to other memory."""
    with no_interception():
        data = _T.data.__get__(new)
        if isinstance(new, DistTensor):
            note_counter(new, data)
    return detached_view(data, new, is_data=True) if isinstance(new, DistView) else as_part(plain_view(data), have)


def _check_mesh(x: DistTensor, new: Tensor, have: Spec, need: Spec) -> None:
    if have.mesh is need.mesh and (isinstance(new, DistTensor) or need.mesh.size == current_communicator().size):
        return
    found = f"y is {have!r} on {have.mesh!r}" if isinstance(new, DistTensor) else f"y is plain {tuple(new.shape)}"
    raise _mesh_error(x, found, "x.data")


def _mesh_error(x: DistTensor, found: str, asked: str) -> MemoryAccessError:
    return MemoryAccessError(
        f"{asked} = y",
        f"x is {x._spec!r} on {x._spec.mesh!r}, {found}",
        "on one device they would share memory, and not every rank that holds y holds a part of x",
        f"write {asked} = y.clone(), which has its own memory, or {asked}.copy_(y)",
    )


def _is_only_user(view: DistView) -> bool:
    """True if nothing else uses the memory that `view` took over, on any rank.

    Every rank of the mesh makes the call.
    """
    base = view._source.base
    with no_interception():
        shared = isinstance(base, DistView) or tensors_on_storage(base) > 1
    alone = not _on_any_rank(shared, view._spec.mesh, view.device)
    if alone:
        _state.views.pop(id(view), None)
    return alone


def _on_any_rank(flag: bool, mesh: ProcessMesh, device: torch.device) -> bool:
    asked = Spec(mesh, layout_of([Partial("max")] * len(mesh.sizes), 0, mesh), (), torch.int64)
    with torch.no_grad():
        found = convert_local(torch.tensor(int(flag), device=device), asked, asked.with_layout(replicated(0)))
    with no_interception():
        return bool(found.item())


def register(view: DistView) -> None:
    """Register `view` to be read again before each backward pass, which may have saved it."""
    views, key = _state.views, id(view)
    views[key] = ref(view, lambda _: views.pop(key, None))


def _living_views() -> list[DistView]:
    """Return the tensors of this rank that took over memory as views; every rank has them in the same order."""
    found = [view() for view in list(_state.views.values())]
    return [v for v in found if isinstance(v, DistView)]


def read_shared() -> None:
    """Read again the tensors that took over memory as views, before a backward pass; every rank makes the call."""
    if _state.views and backward_running() == -1:
        before_call(_living_views())


def sharing_views() -> list[DistView]:
    """Return the tensors that are views because of `x.data = y`, after ending those that no longer share memory.

    Every rank makes the call.
    """
    for view in _living_views() if _state.views else ():
        outer = view._outer
        if outer._source.ends is not None and outer._source.ends(outer):
            end_outer_view(outer)
    return _living_views() if _state.views else []
