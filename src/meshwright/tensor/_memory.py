"""The memory of the whole tensor, for callers that ask for an address or a storage.

A rank holds only a part, so the whole value is gathered into new memory, which is kept as long as the tensor. Libraries
find tied weights by comparing addresses. So two tensors on the same memory get the same address if they have the same
shape, or if one is a view of the other. Writes to this memory would be lost, so the storage that users see raises an
error on a write.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from meshwright.comm import current

from ._alias import DistView
from ._dist_tensor import DistTensor, plain_view
from ._errors import MemoryAccessError
from ._handle_values import everywhere
from ._tree import map_tensors, tensors_in
from ._writes import writes_to
from .torch_hooks import no_interception


def holds_whole(x: DistTensor) -> bool:
    """True if every rank of the world holds the whole value, and `x` is no view that is a copy."""
    layout, sizes = x._spec.layout, x._spec.mesh.sizes
    if x._away or x._viewing or x._spec.mesh.size != current().size:
        return False
    return all(sizes[axis] == 1 for axis in (*layout.cut_axes, *layout.partial_axes))


class _Kept:
    """Gathered memory of a tensor and the version of its content; a version of None means out of date."""

    def __init__(self) -> None:
        self.whole: Tensor | None = None
        self.version: int | None = None


class _OfThread(threading.local):
    """The gathered memory that a rank keeps; simulated ranks are threads."""

    def __init__(self) -> None:
        self.kept: WeakSet[_Kept] = WeakSet()


_thread = _OfThread()


def release_memory() -> None:
    """Free all gathered memory of the rank, when a backward pass begins: no address is used across training steps."""
    if not len(_thread.kept):  # a loop over a WeakSet takes longer
        return
    for kept in _thread.kept:
        kept.whole, kept.version = None, None


def memory_of(x: Tensor) -> Tensor:
    """Return the whole value of `x` as a plain tensor, at the same address as long as nobody writes to `x`.

    Every rank of the world makes the call, unless each holds the whole value or made the same call before.
    """
    if not isinstance(x, DistTensor):
        return x
    x._read_again()
    if holds_whole(x):
        with no_interception():
            return plain_view(x)
    with torch.no_grad():
        found = _memory_of_view(x) if isinstance(x, DistView) else None
        return _kept_memory(x) if found is None else found


def _memory_of_view(x: DistView) -> Tensor | None:
    """Return the same view of the gathered memory of the base; None if the view has to be gathered itself."""
    if x._outer is x:
        return _replayed(x)
    memory = memory_of(x._outer)
    with no_interception():
        if x._spec.layout.cut_axes or x._spec.layout.partial_axes or x._outer.stride() != memory.stride():
            return None
        start = memory.storage_offset() + x.storage_offset() - x._outer.storage_offset()
        return memory.as_strided(x.size(), x.stride(), start)


def _replayed(x: DistView) -> Tensor:
    source = x._source
    memory = memory_of(source.base)
    args, kwargs = map_tensors(lambda t: memory if t is source.base else everywhere(t), (source.args, source.kwargs))
    with no_interception():
        return list(tensors_in(source.func(*args, **kwargs)))[source.at]


def _kept_memory(x: DistTensor) -> Tensor:
    """Return the gathered memory of `x`, or of a tensor on the same part; gather again if `x` was written to."""
    with no_interception():
        storage: Any = x.untyped_storage()
        key = (x._spec, x.storage_offset(), tuple(x.size()), tuple(x.stride()))
        version = None if x.is_inference() else writes_to(x)
    table: WeakValueDictionary[Any, _Kept] = storage.__dict__.setdefault("_meshwright_kept", WeakValueDictionary())
    kept = table.get(key)
    if kept is None:
        kept = table[key] = _Kept()
        _thread.kept.add(kept)
    held: Any = x.__dict__
    held["_memory"] = kept  # the tensor keeps its gathered memory, and with it the address, alive
    if kept.whole is None:
        kept.whole, kept.version = _gathered(x, table), version
    elif version is None or kept.version != version:
        kept.whole.copy_(everywhere(x))
        kept.version = version
    return kept.whole


def _gathered(x: DistTensor, table: WeakValueDictionary[Any, _Kept]) -> Tensor:
    """Return new memory with the value of `x`, or a view of the gathered memory of a tensor on the same part."""
    whole, strides = everywhere(x), x.stride()
    base = x._base
    if isinstance(base, DistTensor) and base is not x:
        memory_of(base)
    with no_interception():
        for key, kept in list(table.items()):
            seen = None if kept.whole is None else _seen(x, whole, key, kept.whole)
            if seen is not None and torch.equal(seen, whole):
                return seen
        return torch.empty_strided(whole.shape, strides, dtype=whole.dtype, device=whole.device).copy_(whole)


def _seen(x: DistTensor, whole: Tensor, key: Any, memory: Tensor) -> Tensor | None:
    """Return a view for `x` of the gathered memory of another tensor on the same part, or None.

    A view exists if both tensors are contiguous with the same number of elements. It also exists if no dim of either
    tensor is sharded, because the part then has the strides of the whole tensor.
    """
    spec, offset, _, strides = key
    if x.is_contiguous() and memory.is_contiguous() and memory.numel() == whole.numel() and memory.dtype == whole.dtype:
        return memory.view(whole.shape)
    if x._spec.layout.cut_axes or spec.layout.cut_axes or strides != memory.stride() or spec.dtype != x._spec.dtype:
        return None
    start = memory.storage_offset() + x.storage_offset() - offset
    end = start + sum((n - 1) * step for n, step in zip(x.size(), x.stride(), strict=True))
    inside = start >= 0 and (end + 1) * memory.element_size() <= memory.untyped_storage().nbytes()
    return memory.as_strided(x.size(), x.stride(), start) if inside and whole.numel() else None


def _refuse(name: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise MemoryAccessError(
            f"{name} of the storage of a distributed tensor", f"{self.nbytes()} bytes",
            "the storage is a gathered copy of the whole tensor, and a write to the copy would be lost",
            "call x.copy_(...) or x.fill_(...), or write x[...] = ..., which change every rank's part",
        )  # fmt: skip

    return refuse


def _writes(name: str) -> bool:
    """True for methods of a storage that write to its memory or share it with other processes."""
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in ("__setitem__", "byteswap") or name.startswith(("_share", "_set"))


_REFUSED = {name: _refuse(name) for name in dir(torch.UntypedStorage) if _writes(name)}
WholeStorage = type("WholeStorage", (torch.UntypedStorage,), _REFUSED)
"""The storage of a distributed tensor: a gathered copy, which may only be read."""


def storage_of(x: DistTensor) -> Any:
    """Return the storage of the whole tensor; a gathered storage raises MemoryAccessError on a write."""
    memory = memory_of(x)
    with no_interception():
        storage: Any = memory.untyped_storage()
    if not holds_whole(x):
        storage.__class__ = WholeStorage
    return storage
