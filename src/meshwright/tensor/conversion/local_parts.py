"""Conversion, gathering and write-back of local parts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, is_grad_enabled

from meshwright.layout import ProcessMesh, Spec, replicated

from ..capture.call_capture import strides_of
from ..core.dist_tensor import DistTensor, as_part, is_leaf, plain_view, wants_grad
from ..torch_hooks import no_interception
from .convert import Move, convert_local
from .pending_gradients import defer_reduction
from .saved_operands import note_alias, note_move


def shared_move(x: Tensor, how: Move, exact: bool = True) -> Tensor:
    """Return `x` after `how`; computed once and shared by all uses, as long as `x` is not written to.

    `exact` is False if other operators than one device's will use the result, and save other tensors for the backward
    pass. Call it with interception off. Shared are intermediate results that need a gradient, and without gradients
    only reduced sums, since gathered parameters would stay in memory. The reductions of a leaf are deferred and added
    up. A tensor whose `.data` was read may be written to without notice.
    """
    if how.is_trivial:
        return x
    if not isinstance(x, DistTensor):
        return note_move(how(x), x, how, exact)
    if not is_grad_enabled():
        return _shared(x, how, exact) if how.reduces_only and _may_be_shared(x) else how(x)
    if is_leaf(x):  # a tensor that needs no gradient is a leaf, too
        if how.is_relabel and wants_grad(x):
            return note_alias(defer_reduction(x, how), x)
        return note_move(how(x), x, how, exact)
    return _shared(x, how, exact)


def _shared(x: DistTensor, how: Move, exact: bool) -> Tensor:
    """Return `x` after `how`, from the last conversion of `x` if that was the same."""
    held: Any = x.__dict__
    found = held.get("_shared")
    if found is not None and found[0] is how and found[1] == x._version:
        return found[2]
    out = note_move(how(x), x, how, exact)
    if "_exposed" not in held:
        held["_shared"] = (how, x._version, out)
    return out


def _may_be_shared(x: DistTensor) -> bool:
    """True if a reduced sum of `x` without gradient may be shared: writes to `x` are counted, and it has no history."""
    return not (wants_grad(x) or x.is_inference())


def may_be_reduced(x: Tensor) -> bool:
    """True if a conversion of `x` is shared, so that `reduced_before` may return its result."""
    return "_shared" in x.__dict__


def reduced_before(x: DistTensor) -> DistTensor | None:
    """Return the value of `x`, a pending sum, if it was reduced before, else None; call it with interception off."""
    found: Any = x.__dict__.get("_shared")
    if found is None:
        return None
    how, version, out = found
    if not how.reduces_only or how.src is not x._spec or version != x._version:
        return None
    if is_grad_enabled() and wants_grad(x) != wants_grad(out):
        return None
    return as_part(out.view_as(out), how.dst)


def is_empty(x: Tensor) -> bool:
    """True if the whole tensor has no elements; a symbolic size is at least two."""
    return any(type(n) is int and n == 0 for n in x.shape)


def whole_spec(spec: Spec) -> Spec:
    """Return the spec of the same tensor if every rank holds the whole."""
    return spec.with_layout(replicated(spec.ndim))


def linear_spec(spec: Spec) -> Spec:
    """Return `spec` if derivatives can be computed on local parts, else the spec of the whole value.

    Single terms of a maximum, a minimum or a product have no derivatives.
    """
    return spec if all(op in ("sum", "avg") for _, op in spec.layout.partial) else whole_spec(spec)


def whole_local(x: Tensor) -> Tensor:
    """Return the whole value of `x` as a plain local tensor on every rank of its mesh."""
    if not isinstance(x, DistTensor):
        return x
    out = convert_local(x, x._spec, whole_spec(x._spec))
    with no_interception():
        return plain_view(out)


def spec_of(x: Tensor, like: Spec) -> Spec:
    """Return the spec of `x`; a plain tensor is replicated over the mesh of `like`."""
    return x._spec if isinstance(x, DistTensor) else spec_of_whole(x, like.mesh)


def spec_of_whole(x: Tensor, mesh: ProcessMesh) -> Spec:
    """Return the spec of a plain tensor of which every rank of `mesh` holds the whole."""
    return Spec(mesh, replicated(x.dim()), x.shape, x.dtype, strides_of(x))


def write_into(target: Tensor, new: Tensor) -> Tensor:
    """Write the value of `new` into `target`, with broadcasting and in any layouts, and return `target`."""
    if not isinstance(target, DistTensor):
        return target.copy_(whole_local(new))
    spec = target._spec
    if new.shape != spec.shape:
        new = new.expand(spec.shape)
    have = spec_of(new, spec)
    local = convert_local(new, have, have.with_layout(spec.layout))
    with no_interception():
        target.copy_(local)
    return target
