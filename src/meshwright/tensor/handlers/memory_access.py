"""Functions about the memory of a tensor: addresses, storages, NumPy arrays, DLPack capsules.

Each one answers for the whole tensor, or raises an error. The parts are gathered, so every rank of the world makes the
call, unless every rank holds the whole value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import TorchValue, whole_of

from .._errors import MemoryAccessError
from .._torch_call import TorchFunction
from ..conversion.local_parts import write_into
from ..conversion.python_values import gather_everywhere
from ..core.dist_tensor import DistTensor, plain_view
from ..core.handler_registry import handles
from ..core.tree import map_tensors
from ..torch_hooks import call_plain, interception_on, no_interception
from ..views.gathered_memory import holds_whole, memory_of, offset_of, storage_of

_T: Any = Tensor
"""Tensor, untyped: the type checker takes its attributes for values, but they are descriptors."""


def _present(*names: str) -> list[TorchFunction]:
    """Return the members of `Tensor` with these names that this release of torch has."""
    return [getattr(Tensor, name) for name in names if hasattr(Tensor, name)]


@handles(*_present("data_ptr", "const_data_ptr", "__dlpack_device__", "is_set_to"), _T.__cuda_array_interface__.__get__)
def _call_on_memory(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    args, kwargs = map_tensors(memory_of, (args, kwargs))
    with no_interception():
        return func(*args, **kwargs)


@handles(Tensor.storage_offset)
def _storage_offset(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return the offset in the memory of the whole tensor."""
    x = args[0]
    return call_plain(func, types, args, kwargs) if holds_whole(x) else offset_of(x)


@handles(Tensor.untyped_storage)
def _untyped_storage(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    return storage_of(args[0])


@handles(*_present("storage", "mutable_data_ptr"))
def _writable_memory(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    x = args[0]
    if holds_whole(x):
        return call_plain(func, types, args, kwargs)
    raise refusal(
        f"Tensor.{func.__name__}",
        x,
        "call x.untyped_storage() to read the whole memory, mw.unshard_dtensor(x) "
        "for a plain tensor, or x.to_local() for this rank's part",
    )


def _typed_storage(self: DistTensor) -> TorchValue:
    """Return the typed storage, for torch's own Python code, which requests it with interception off."""
    if interception_on() and not holds_whole(self):
        raise refusal("a typed storage", self, "call x.untyped_storage() to read the whole memory")
    return Tensor._typed_storage(self)


DistTensor._typed_storage = _typed_storage


@handles(Tensor.type, Tensor.storage_type)
def _type(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return the type name of the part, which the whole tensor shares; a call that casts is an operation."""
    return NotImplemented if len(args) > 1 or kwargs else call_plain(func, types, args, kwargs)


@handles(Tensor.numpy, Tensor.__array__)
def _numpy(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return the whole tensor as an array; a gathered array is a copy, so it is read-only."""
    x = args[0]
    if holds_whole(x):
        return _locally(func, x, args, kwargs)
    whole = _in_memory_order(x)
    with no_interception():
        array = func(whole, *args[1:], **kwargs)
    array.flags.writeable = False
    return array


def _in_memory_order(x: DistTensor) -> Tensor:
    """Return the whole value with the strides of one device."""
    whole, strides = gather_everywhere(x), x._spec.strides
    with no_interception():
        return whole if strides is None else whole_of(whole, strides)


@handles(Tensor.__dlpack__)
def _dlpack(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Export the memory, or a copy if the caller requests one; a write to a gathered tensor would be lost."""
    x = args[0]
    if holds_whole(x):
        return _locally(func, x, args, kwargs)
    if kwargs.get("copy") is not True:
        raise refusal(
            "Tensor.__dlpack__",
            x,
            "call from_dlpack(x, copy=True) for a copy, or numpy.asarray(x) for a read-only array",
        )
    whole = _in_memory_order(x)
    with no_interception():
        return func(whole, *args[1:], **kwargs)


def _locally(func: TorchFunction, x: DistTensor, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    with no_interception():
        return func(plain_view(x), *args[1:], **kwargs)


@handles(*_present("apply_", "map_", "map2_"))
def _elementwise(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Call a Python function on each element of the whole tensor, since the function may keep a state."""
    x = args[0]
    if not isinstance(x, DistTensor):
        other = next(a for a in args if isinstance(a, DistTensor))
        raise refusal(f"Tensor.{func.__name__} of a plain tensor", other, "pass mw.unshard_dtensor(x)")
    whole = [gather_everywhere(t).clone() if isinstance(t, Tensor) else t for t in args]
    with no_interception():
        func(*whole, **kwargs)
    with torch.no_grad():
        return write_into(x, whole[0])


@handles(*_present("resize_", "resize_as_"))
def _new_memory(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Resize a plain tensor; raise MemoryAccessError if a part would need memory of another size."""
    x, given = args[0], (*args[1:], *kwargs.values())
    if x.requires_grad:
        raise RuntimeError("cannot resize variables that require grad")  # as torch does for any shape
    shape = given[0].shape if func == Tensor.resize_as_ else tuple(int(n) for n in _listed_sizes(args[1:]))
    if tuple(shape) == tuple(x.shape):
        return x
    if not isinstance(x, DistTensor):
        return x.resize_(shape)
    raise refusal(f"Tensor.{func.__name__} to shape {tuple(shape)}", x, "write x.data = new, or make a new tensor")


@handles(*_present("_view_func", "_view_func_unsafe", "_rev_view_func_unsafe"))
def _view_again(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Raise MemoryAccessError: autograd would repeat the view with the sizes of parts."""
    some = next(a for a in args if isinstance(a, DistTensor))
    raise refusal(f"Tensor.{func.__name__}", some, "repeat the call that made the view on the other tensor")


def _listed_sizes(shape: TorchValue) -> TorchValue:
    return shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape


def refusal(asked: str, x: DistTensor, write: str) -> MemoryAccessError:
    """Return the error for a request that this rank could only answer for its part."""
    return MemoryAccessError(
        asked, f"{x._spec!r} on {x._spec.mesh!r}", "this rank holds only a part, or a term, of the tensor", write
    )
