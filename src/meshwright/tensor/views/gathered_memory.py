"""The memory of the whole tensor, for callers that request an address or a storage.

A rank holds only a part, so the whole value is gathered into new memory, which is kept as long as the part's memory.
Libraries detect tied weights by comparing addresses. So tensors on the same memory get addresses in the same gathered
memory, at the distances of one device. Writes to this memory would be lost, so the storage that users see raises an
error on a write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NoReturn
from weakref import WeakSet

import torch
from torch import Tensor

from meshwright.comm import current_communicator
from meshwright.layout import Spec

from .._errors import MemoryAccessError
from ..conversion.python_values import gather_everywhere
from ..core.dist_tensor import DistTensor, plain_view
from ..core.tree import map_tensors
from ..core.write_counts import writes_to
from ..torch_hooks import no_interception
from .dist_view import DistView


def holds_whole(x: DistTensor) -> bool:
    """True if every rank of the world holds the whole value, and `x` is no view that is a copy."""
    layout, sizes = x._spec.layout, x._spec.mesh.sizes
    if x._away or x._viewing or x._spec.mesh.size != current_communicator().size:
        return False
    return all(sizes[axis] == 1 for axis in (*layout.cut_axes, *layout.partial_axes))


_Place = tuple[Spec, int, tuple[int, ...], tuple[int, ...]]
"""The spec, the offset, the sizes and the strides of a part in its memory."""


class _GatheredMemory:
    """Gathered memory of a tensor, and the number of writes included in its content; None means out of date."""

    def __init__(self) -> None:
        self.whole: Tensor | None = None
        self.version: int | None = None


class _ThreadMemory(threading.local):
    """The gathered memory that a rank keeps; simulated ranks are threads."""

    def __init__(self) -> None:
        self.kept: WeakSet[_GatheredMemory] = WeakSet()


_thread = _ThreadMemory()


def release_memory() -> None:
    """Free all gathered memory of the rank, when a backward pass begins: no address is used across training steps."""
    if not len(_thread.kept):  # a loop over a WeakSet takes longer
        return
    for kept in _thread.kept:
        kept.whole, kept.version = None, None


def memory_of(x: Tensor) -> Tensor:
    """Return the whole value of `x` as a plain tensor, at the same address until `x` is written to.

    Every rank of the world makes the call, unless each holds the whole value or made the same call before.
    """
    if not isinstance(x, DistTensor):
        return x
    x._read_again()
    if holds_whole(x):
        with no_interception():
            return plain_view(x)
    with torch.no_grad():
        return _memory_of_view(x) if isinstance(x, DistView) else _kept_memory(x)


def _memory_of_view(x: DistView) -> Tensor:
    """Return the same view of the gathered memory of the base."""
    outer = x._outer
    if outer is x:
        return _replayed_view(x)
    memory = memory_of(outer)
    with no_interception():
        local = int(x.storage_offset()) - int(outer.storage_offset())
        start = memory.storage_offset() + whole_distance(local, outer.size(), outer.stride(), memory.stride())
    return memory.as_strided(x._spec.shape, x._spec.full_strides, start)


def _replayed_view(x: DistView) -> Tensor:
    source = x._source
    memory = memory_of(source.base)
    args, kwargs = map_tensors(
        lambda t: memory if t is source.base else gather_everywhere(t), (source.args, source.kwargs)
    )
    with no_interception():
        return source.result_in(source.func(*args, **kwargs))


def _kept_memory(x: DistTensor) -> Tensor:
    """Return the gathered memory of `x`, or of a tensor on the same part; gather again if `x` was written to."""
    with no_interception():
        storage = x.untyped_storage()
        key = (x._spec, int(x.storage_offset()), tuple(x.size()), tuple(x.stride()))
        version = None if x.is_inference() else writes_to(x)
    table: dict[_Place, _GatheredMemory] = storage.__dict__.setdefault("_meshwright_kept", {})
    kept = table.get(key)
    if kept is None:
        # stored on the part's memory, not on `x`: `x.detach()` may be freed already
        kept = table[key] = _GatheredMemory()
        _thread.kept.add(kept)
    if kept.whole is None:
        kept.whole, kept.version = _new_memory(x, table), version
    elif version is None or kept.version != version:
        kept.whole.copy_(gather_everywhere(x))
        kept.version = version
    return kept.whole


def _new_memory(x: DistTensor, table: dict[_Place, _GatheredMemory]) -> Tensor:
    """Return new memory with the value of `x`, or a view of the gathered memory of a tensor on the same part."""
    whole, strides = gather_everywhere(x), x.stride()
    base = x._base
    if isinstance(base, DistTensor) and base is not x:
        memory_of(base)
    with no_interception():
        for key, kept in list(table.items()):
            seen = None if kept.whole is None else _view_in_memory(x, whole, key, kept.whole)
            if seen is not None and torch.equal(seen, whole):
                return seen
        return torch.empty_strided(whole.shape, strides, dtype=whole.dtype, device=whole.device).copy_(whole)


def _view_in_memory(x: DistTensor, whole: Tensor, place: _Place, memory: Tensor) -> Tensor | None:
    """Return a view for `x` of the gathered memory of another tensor on the same part, or None if `x` is outside it."""
    spec, offset, size, strides = place
    if spec.dtype != x._spec.dtype or not whole.numel():
        return None
    if x._spec.strides is None and memory.is_contiguous() and memory.numel() == whole.numel():
        return memory.view(whole.shape)
    start = memory.storage_offset() + whole_distance(int(x.storage_offset()) - offset, size, strides, memory.stride())
    full = x._spec.full_strides
    end = start + sum((n - 1) * step for n, step in zip(whole.shape, full, strict=True))
    inside = start >= 0 and (end + 1) * memory.element_size() <= memory.untyped_storage().nbytes()
    return memory.as_strided(whole.shape, full, start) if inside else None


def whole_distance(local: int, size: Sequence[int], strides: Sequence[int], full: Sequence[int]) -> int:
    """Return the distance in the whole memory between two elements that are `local` apart in the part's memory.

    `strides` are those of the part and `full` those of the whole tensor. The distance is read as steps along the dims,
    in descending order of strides.
    """
    steps = sorted(zip(strides, full, size, strict=True), key=lambda s: -s[0])
    found, left = 0, local
    for here, whole, n in steps:
        if n > 1 and here > 0:
            found += left // here * whole
            left %= here
    return found


def offset_of(x: DistTensor) -> int:
    """Return the offset of the whole tensor in its storage. Raises MemoryAccessError if this rank does not know it.

    Along each dim, a view of the local part is the same number of steps from its base as the whole view.
    """
    if isinstance(x, DistView):
        if x._outer is x:
            return int(_replayed_view(x).storage_offset())
        start, base = offset_of(x._outer), x._outer
    else:
        start, base = 0, x._base
    with no_interception():
        if not isinstance(base, DistTensor):
            if x.storage_offset() == 0:
                return 0
            raise MemoryAccessError(
                "Tensor.storage_offset",
                f"{x._spec!r}, which has no base",
                "this rank knows only the offset in its own part",
                "call storage_offset() before x.detach() and outside torch.inference_mode(), or use x.data_ptr()",
            )
        local = int(x.storage_offset()) - int(base.storage_offset())
        return start + whole_distance(local, base.size(), base.stride(), base._spec.full_strides)


def _refused_write(name: str) -> Callable[..., NoReturn]:
    def refuse(self: torch.UntypedStorage, *args: object, **kwargs: object) -> NoReturn:
        raise MemoryAccessError(
            f"{name} of the storage of a distributed tensor",
            f"{self.nbytes()} bytes",
            "the storage is a gathered copy of the whole tensor, and a write to the copy would be lost",
            "call x.copy_(...) or x.fill_(...), or write x[...] = ..., which change every rank's part",
        )

    return refuse


def _is_write(name: str) -> bool:
    """True for methods of a storage that write to its memory or share it with other processes."""
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in ("__setitem__", "byteswap") or name.startswith(("_share", "_set"))


_REFUSED = {name: _refused_write(name) for name in dir(torch.UntypedStorage) if _is_write(name)}
WholeStorage: type[torch.UntypedStorage] = type("WholeStorage", (torch.UntypedStorage,), _REFUSED)
"""The storage of a distributed tensor: a gathered copy, which is read-only."""


def _extent_in_bytes(memory: Tensor) -> int:
    """Return the bytes from the first to the last element."""
    reach = sum((n - 1) * step for n, step in zip(memory.shape, memory.stride(), strict=True))
    return (reach + 1) * memory.element_size()


def storage_of(x: DistTensor) -> torch.UntypedStorage:
    """Return the storage of the whole tensor; a gathered storage raises MemoryAccessError on a write."""
    memory = memory_of(x)
    with no_interception():
        storage = memory.untyped_storage()
        has_gaps = not x._spec.is_dense and not holds_whole(x) and storage.nbytes() == _extent_in_bytes(memory)
    if has_gaps:
        raise MemoryAccessError(
            "the storage of a view",
            f"{x._spec!r}, which has no base",
            "the view's memory has gaps, and the bytes in the gaps belong to a tensor that this rank does not know",
            "take the storage of the base tensor or of x.contiguous()",
        )
    with no_interception():
        storage = memory.untyped_storage()
    if not holds_whole(x):
        storage.__class__ = WholeStorage
    return storage
