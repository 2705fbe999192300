"""Attributes, memory and device of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import swap_tensors

from meshwright.layout import Layout, Product, Spec, TorchValue

from .._errors import MemoryAccessError, OperationError
from .._torch_call import TorchFunction
from ..autograd.assigned_gradients import has_assigned
from ..autograd.intercepted_call import argument_at
from ..conversion.convert import arranged, convert_local
from ..conversion.local_parts import spec_of, whole_local, whole_spec, write_into
from ..conversion.pending_gradients import flush
from ..conversion.saved_operands import unnoted
from ..core.absent_tensor import absent
from ..core.dist_tensor import DistTensor, as_part, plain_view
from ..core.handler_registry import handles
from ..core.tree import map_tensors
from ..core.write_counts import note_counter, version_of
from ..torch_hooks import OperatorPacket, call_plain, interception_on, no_interception, offer_call, tensors_on_storage
from ..views.dist_view import DistView, base_of, counted_with, detached_view, exchange_with_view, leave_memory
from ..views.shared_data import from_other_mesh, is_on_other_mesh, is_temporary, put_data
from .torch_hooks import same_kind

_T: Any = Tensor
"""Tensor, untyped: the type checker takes its attributes for values, but they are descriptors."""


_LOCAL = [
    "device", "layout", "is_sparse", "is_quantized", "is_cuda", "is_cpu", "is_mps",
    "is_xpu", "is_mkldnn", "is_meta", "is_nested", "retains_grad", "_backward_hooks",
    "_post_accumulate_grad_hooks", "names", "is_vulkan", "is_xla", "is_ipu", "is_maia", "is_mtia", "is_sparse_csr",
    "dtype", "volatile", "_cdata", "name", "is_hpu",
]  # fmt: skip
_LOCAL_CALLS: list[TorchFunction] = [
    Tensor.requires_grad_, Tensor.is_inference, Tensor.is_shared, Tensor.get_device, Tensor.retain_grad,
    Tensor.is_pinned, Tensor.__hash__, torch.is_grad_enabled, same_kind,
    Tensor.is_conj, Tensor.is_neg, torch.is_conj, torch.is_neg,
]  # fmt: skip


@handles(
    *[getattr(Tensor, n).__get__ for n in _LOCAL if hasattr(Tensor, n)],
    *(_T.requires_grad.__set__, _T._backward_hooks.__set__),
    *_LOCAL_CALLS,
    numbers=False,
)
def _local(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return the attribute or call of the local tensor."""
    return call_plain(func, types, args, kwargs or {})


@handles(_T._version.__get__, numbers=False)
def _version(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> int:
    """Return the number of writes to the tensor's memory; a view has the number of its base."""
    if args[0].is_inference():
        return call_plain(func, types, args, kwargs or {})  # torch's error: such a tensor has no number
    return version_of(counted_with(args[0]))


@handles(_T._base.__get__, numbers=False)
def _base(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return the tensor at the base of the views, or None; the local part of a leaf is no base."""
    x = args[0]
    if isinstance(x, DistView) and x._seen:
        first = base_of(x)
        return first if first._base is None else first._base
    base = call_plain(func, types, args, kwargs or {})
    return base if isinstance(base, DistTensor) else None


@handles(Tensor._is_view, numbers=False)
def _is_view(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> bool:
    return args[0]._base is not None


@handles(_T.data.__get__, Tensor.detach, Tensor.detach_)
def _same_layout(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    x = args[0]
    if x._viewing and func == Tensor.detach_:
        return NotImplemented
    out = call_plain(func, types, args, kwargs)
    if func == _T.data.__get__:
        x.__dict__.pop("_shared", None)
        x.__dict__["_exposed"] = True
        with no_interception():
            note_counter(x, out)
    if out is x:
        return x
    if x._viewing:
        return detached_view(out, x, func == _T.data.__get__)
    return absent(out, x._spec) if x._away else as_part(out, x._spec)


@handles(_T.data.__set__)
def _set_data(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> None:
    """Carry out `x.data = new`. `x` keeps its layout, also for another shape with the same number of dims."""
    x, new = args
    if not isinstance(x, DistTensor):
        return call_plain(func, types, args, kwargs)
    have = spec_of(new, x._spec)
    put_data(x, new, have, _spec_of_data(x, have))


_PUT_DATA = _T.data.__set__


def _write_data(x: DistTensor, new: TorchValue) -> None:
    """Carry out `x.data = new`.

    A temporary is converted to the layout of `x` first, because no other code uses its memory.
    """
    if interception_on() and isinstance(new, Tensor):
        is_alone = is_temporary(new)
        if is_on_other_mesh(new, x):
            new = from_other_mesh(x, new, _spec_of_data(x, spec_of(new, x._spec)), is_alone, "x.data")
        elif is_alone:
            new = _laid_like(x, new)
    _PUT_DATA(x, new)


def _laid_like(x: DistTensor, new: Tensor) -> Tensor:
    have = spec_of(new, x._spec)
    need = _spec_of_data(x, have)
    if x._away or (have.mesh is need.mesh and have.layout == need.layout):
        return new
    with torch.no_grad():
        return as_part(plain_view(convert_local(new.detach(), have, need)), need)


DistTensor.data = property(_T.data.__get__, _write_data)  # pyright: ignore[reportAttributeAccessIssue] - a property
"""This property sees whether the caller keeps the tensor that it assigns."""


def takes_memory(x: DistTensor, source: DistTensor) -> bool:
    """Give `x` the memory and the layout of `source`, as `x.set_(source)` does; False if this is not possible.

    `torch.nn.utils.parametrize` calls `set_` on parameters. A view has its own memory, and stays as it is.
    """
    if x.dtype != source.dtype or x._viewing or source._viewing:
        return False
    grad = _gradient_of(x)
    leave_memory(x)
    with no_interception():
        _T.data.__set__(x, plain_view(source))
        note_counter(source, x)
    vars(x).pop("_shared", None)
    if grad is None or source._spec.layout == x._spec.layout or grad.shape != source.shape:
        x._spec = source._spec
        return True
    x.grad = None
    x._spec = source._spec
    x.grad = grad  # in the new layout
    return True


def _gradient_of(x: DistTensor) -> Tensor | None:
    """Return `x.grad`, or None for a computed tensor. After this read, the gradient has its own spec."""
    return x.grad if x.is_leaf else None


def _spec_of_data(x: DistTensor, have: Spec) -> Spec:
    """Return the spec of `x` after it takes over data with the spec `have`."""
    if have.shape != x._spec.shape or have.dtype != x._spec.dtype:
        flush()  # a pending gradient of the old shape or dtype cannot be added later
    if have.shape == x._spec.shape:
        return Spec(x._spec.mesh, x._spec.layout, have.shape, have.dtype, have.new.strides)
    with no_interception():
        graded = x.grad is not None or x.grad_fn is not None
    if graded or x._viewing:
        raise MemoryAccessError(
            f"x.data = y with y of shape {tuple(have.shape)}",
            f"{x._spec!r}, a {_state(x)}",
            "the gradient or the base of x has the old shape",
            "set x.grad = None first, or write x = y if x is a computed value or a view",
        )
    if have.ndim != x._spec.ndim or any(isinstance(dim, Product) for dim in x._spec.layout.dims):
        return have
    return Spec(x._spec.mesh, x._spec.layout, have.shape, have.dtype, have.new.strides)


def _state(x: DistTensor) -> str:
    return "view" if x._viewing else "tensor with a gradient, or a computed value"


@handles(Tensor.cpu, Tensor.cuda, Tensor.pin_memory, Tensor.share_memory_)
def _on_device(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    x = args[0]
    out = call_plain(func, types, args, kwargs)
    return x if out is x else as_part(out, x._spec.new)


@handles(Tensor.to, torch.ops.aten.to.dtype_layout, torch.ops.aten.to.device)
def _converted(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    x = args[0]
    given = (*args[1:], *kwargs.values())
    named = any(isinstance(a, (str, torch.device)) for a in given)
    if not isinstance(x, DistTensor) or x._viewing or not named:
        return NotImplemented
    if x._spec.layout.partial and any(isinstance(a, torch.dtype) and a is not x._spec.dtype for a in given):
        return func(_summed(x), *args[1:], **kwargs)  # reduce the terms before they are rounded
    out = call_plain(func, types, args, kwargs)
    if out is x:
        return x
    spec = x._spec.new
    with no_interception():
        spec = _formatted(spec, kwargs.get("memory_format")).with_dtype(out.dtype)
        out = arranged(out, spec)
    return absent(out, spec) if x._away else as_part(out, spec)


def _summed(x: DistTensor) -> DistTensor:
    """Return `x` with its pending sums reduced."""
    spec = x._spec.new.with_layout(replace(x._spec.layout, partial=())).with_strides(x._spec.new.strides)
    local = convert_local(x, x._spec, spec)
    return absent(local, spec) if x._away else as_part(local, spec)


def _formatted(spec: Spec, memory_format: torch.memory_format | None) -> Spec:
    """Return the spec of a new tensor in one of torch's memory formats."""
    if memory_format is None or memory_format is torch.preserve_format:
        return spec
    return spec.with_strides(torch.empty(spec.shape, memory_format=memory_format, device="meta").stride())


@handles(Tensor.stride, numbers=False)
def _stride(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return the strides of the whole tensor."""
    strides = args[0]._spec.full_strides
    dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim")
    return tuple(strides) if dim is None else strides[dim]


@handles(Tensor.is_contiguous, numbers=False)
def _is_contiguous(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> bool:
    """True if the whole tensor is contiguous in one of torch's memory formats."""
    spec = args[0]._spec
    if len(args) == 1 and not kwargs:
        return spec.strides is None
    whole = torch.empty_strided(spec.shape, spec.full_strides, device="meta")
    return func(whole, *args[1:], **(kwargs or {}))


def _is_here(x: Tensor) -> bool:
    """True for plain tensors, and for distributed ones that are neither absent nor views that are copies."""
    return not isinstance(x, DistTensor) or not (x._away or x._viewing)


@handles(Tensor.copy_)
def _copy(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    x, new = args[0], argument_at(args, kwargs, 1, "src", "other")
    if not isinstance(x, DistTensor) or not isinstance(new, Tensor) or not (_is_here(x) and _is_here(new)):
        return NotImplemented
    return write_into(x, new)


_STATISTICS: dict[TorchFunction, int] = {F.batch_norm: 1, torch.batch_norm: 3, torch.ops.aten.batch_norm.default: 3}
"""Function → index of the running mean among its arguments; the running variance follows it."""
_RUNNING = ("running_mean", "running_var")
_TRAINING = 5
"""Index of the argument `training` of all these functions."""


@handles(*_STATISTICS)
def _batch_norm(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Run batch norm; training writes the same running statistics on every rank.

    Sharded statistics are gathered before the call, and written back after it.
    """
    first = _STATISTICS[func]
    given = [argument_at(args, kwargs, first + i, name) for i, name in enumerate(_RUNNING)]
    parts = [t for t in given if isinstance(t, DistTensor) and _is_here(t) and whole_spec(t._spec) != t._spec]
    if not parts or not argument_at(args, kwargs, _TRAINING, "training"):
        return NotImplemented
    with torch.no_grad():
        whole = {id(t): as_part(whole_local(t).clone(), whole_spec(t._spec)) for t in parts}
    args, kwargs = map_tensors(lambda t: whole.get(id(t), t), (args, kwargs))
    out = func(*args, **kwargs)
    with torch.no_grad():
        for t in parts:
            write_into(t, whole[id(t)])
    return out


@handles(*filter(None, [getattr(F, "linear_cross_entropy", None)]))
def _linear_cross_entropy(
    func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue
) -> TorchValue:
    """Run the function unchunked.

    Its options split it into chunks, whose operator computes gradients in advance and checks which inputs need some.
    """
    return NotImplemented if kwargs.get("options") is None else func(*args, **{**kwargs, "options": None})


_RESHAPED = ["squeeze_", "unsqueeze_", "t_", "transpose_", "swapdims_", "swapaxes_", "as_strided_"]


_RESHAPING: list[OperatorPacket] = [getattr(torch.ops.aten, n) for n in _RESHAPED]


@handles(*[getattr(Tensor, n) for n in _RESHAPED], *[getattr(op, o) for op in _RESHAPING for o in op.overloads()])
def _reshape_in_place(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Change the shape of a tensor in place: its memory is reinterpreted, or the tensor moves to new memory."""
    x, name = args[0], func.__name__.split(".")[0]
    with unnoted():  # a note of a copy refers to `x`, which could not move then
        new = getattr(Tensor, name[:-1])(*args, **kwargs)
    if x._viewing or not isinstance(new, DistTensor):
        return NotImplemented
    if not x._away and _real_axes(new._spec) != _real_axes(x._spec):
        return _moved_into(x, new, name)
    _gradient_of(x)  # called for its effect: the gradient gets its own spec
    leave_memory(x)  # views of `x` stay views of its memory in the shape that it had
    if not x._away:
        _reshape_part(name, x, args[1:], kwargs)
    x._spec = new._spec
    return x


def _reshape_part(name: str, x: DistTensor, sizes: TorchValue, kwargs: TorchValue) -> None:
    """Call the method that changes the shape of this rank's part as that of the whole tensor."""
    if name == "squeeze_":
        sizes, kwargs = [_squeezed_dims(x, *sizes, **kwargs)], {}
    with no_interception():
        getattr(Tensor, name)(x, *sizes, **kwargs)


@handles(Tensor.as_strided, torch.as_strided, torch.ops.aten.as_strided.default)
def _as_strided(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Raise OperationError for a view of memory outside the tensor's elements, which this rank does not hold."""
    x, at = args[0], argument_at(args, kwargs, 3, "storage_offset")
    if not isinstance(x, DistTensor):
        return NotImplemented
    with no_interception():
        is_view = x._viewing or x._is_view()
    if x._spec.is_dense and not (is_view and at is not None):
        return NotImplemented
    raise OperationError(
        "as_strided",
        f"{x._spec!r}, a view" if is_view else repr(x._spec),
        "as_strided reads memory of the base, and this rank may not hold it",
        "call as_strided on the base or on x.contiguous(), or select elements by x[...]",
    )


def _squeezed_dims(x: Tensor, *dims: int | Sequence[int], dim: int | Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the dims that `squeeze` removes from the whole tensor; a part may have other dims of size 1."""
    asked = dims if dim is None else (dim,)
    listed = [d for given in asked for d in ([given] if isinstance(given, int) else given)]
    if not asked or not x.ndim:
        listed = range(x.ndim)
    return tuple(d for d in listed if x.shape[d] == 1)


_ATEN: Any = torch.ops.aten


@handles(
    *(Tensor.resolve_conj, torch.resolve_conj, _ATEN.resolve_conj.default),
    *(Tensor.resolve_neg, torch.resolve_neg, _ATEN.resolve_neg.default),
)
def _resolve(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return a copy if the conj or neg bit of the local part is set, otherwise the tensor itself."""
    x: DistTensor = argument_at(args, kwargs, 0, "input", "self")
    with no_interception():
        out = func(x)
        if out is x:
            return x
        spec = x._spec.new
        out = arranged(out, spec)
    return absent(out, spec) if x._away else as_part(out, spec)


def _real_axes(spec: Spec) -> set[str]:
    """Return the axes that divide or repeat the tensor; an axis of size 1 does neither."""
    return {a for a in spec.layout.axes if spec.mesh.sizes[a] > 1}


def _swapped(own: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Add up pending gradients before `torch.utils.swap_tensors`, because each belongs to the Python object of a leaf.

    Raises OperationError for a view with its own memory, because its base refers to the Python object.
    """
    found = [x for x in (*args, *kwargs.values()) if isinstance(x, DistTensor)]
    if found:
        flush()
    for x in found:
        if x._viewing or has_assigned(x):
            raise OperationError(
                "torch.utils.swap_tensors",
                f"{x._spec!r}, {'a view' if x._viewing else 'whose gradient is a view'}",
                "the view has its own memory on this rank, and its base refers to this Python object",
                "swap x.clone(), or write x.copy_(y)" if x._viewing else "set x.grad = None first",
            )
    return NotImplemented


offer_call(torch.utils, "swap_tensors", _swapped)


def _moved_into(x: DistTensor, new: DistTensor, name: str) -> DistTensor:
    """Return `x` with the value, the memory and the history of `new`, which cannot share the memory of `x`.

    If other tensors use the memory of `x`, then `x` becomes a view of a tensor that keeps this memory.
    """
    _check_movable(x, name)
    with no_interception():
        is_graded_leaf = x.requires_grad and x.is_leaf
    held: dict[str, object] = {k: v for k, v in x.__dict__.items() if not k.startswith("_") or k == "_is_param"}
    if isinstance(new, DistView) and _is_shared_anywhere(x):
        exchange_with_view(x, new, partial(_swap, x, new, name))
    else:
        _swap(x, new.clone(), name)  # a view of `x` would keep it
    for key, value in held.items():
        setattr(x, key, value)
    if is_graded_leaf:
        x.requires_grad_()
    return x


def _check_movable(x: DistTensor, name: str) -> None:
    """Raise OperationError if `x` cannot move to other memory."""
    with no_interception():
        is_view, is_graded_leaf = x._is_view(), x.requires_grad and x.is_leaf
    has_grad = _gradient_of(x) is not None
    if is_view:
        raise OperationError(
            name,
            f"{x._spec!r}, a view",
            "the parts must move, and would leave the memory of the base",
            f"write x = x.{name[:-1]}(...), which makes a new tensor",
        )
    if is_graded_leaf and (torch.is_grad_enabled() or has_grad):
        raise OperationError(
            name,
            f"{x._spec!r}, a leaf that requires grad" + (" and has a gradient" if has_grad else ""),
            "autograd forbids in-place writes to a leaf, and a gradient would keep the old shape",
            f"set x.grad = None, and call {name} under torch.no_grad()",
        )


def _is_shared_anywhere(x: DistTensor) -> bool:
    """True if another tensor uses the memory of `x` on some rank of its mesh; all ranks of the mesh make the call."""
    mesh = x._spec.mesh
    with no_interception():
        here = torch.tensor([float(tensors_on_storage(x) > 1)], device=x.device)
    spec = Spec(mesh, Layout(((),), tuple((axis, "max") for axis in mesh.dim_names)), (1,), here.dtype)
    with torch.no_grad():
        return bool(convert_local(here, spec, whole_spec(spec)).item())


def _swap(x: DistTensor, new: Tensor, name: str) -> None:
    """Exchange two tensors except for their identity. Raises OperationError if other objects refer to one of them."""
    try:
        with no_interception():  # so that `_swapped` does not refuse a view
            swap_tensors(x, new)
    except RuntimeError as error:
        raise OperationError(
            name,
            f"{x._spec!r}, which other tensors or the autograd graph refer to",
            "the parts must move, and the other tensors would keep the old memory",
            f"write x = x.{name[:-1]}(...), which makes a new tensor",
        ) from error
