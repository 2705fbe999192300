"""Calls that write to memory that another operand shares: the same error on every rank as on one device.

Torch raises an error if the written tensor and another operand share some elements, but are not the same elements in
the same order. A rank's kernel does not see that: an operand may have been gathered, and a part of one row overlaps
otherwise than the whole. So the tensors are compared where one device has them. If one device might raise an error,
the call runs on stand-ins with that memory, which raise it. Torch does not find all overlaps. One that it does not find
makes the result depend on the order in which a kernel visits the elements, so the call is refused.

The memory of the stand-ins is reserved, and no page of it is used until a call writes to it. Elementwise functions of
torch compare their operands before they write. A call of any other function runs on small stand-ins only.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from .._errors import OperationError
from .._torch_call import Arguments, NamedArguments, TorchFunction
from ..core.dist_tensor import DistTensor, FakeDistTensor
from ..core.function_names import name_of
from ..core.tree import leaves_in, map_tensors, tensors_in
from ..torch_hooks import Operator, no_interception, no_modes, shares_storage, written_arguments
from .dist_view import DistView
from .gathered_memory import whole_distance
from .memory_overlap import MOST_UNITS, shared_memory
from .view_origin import ViewOrigin, one_element_stand_in

_TORCH_TEXT = "unsupported operation: "
"""Begin of torch's errors about memory that a written tensor shares."""

_COPYING = ("copy_", "fill_", "__setitem__")
"""Functions whose results are elements of an operand."""

_MOST_ELEMENTS = 1 << 20
"""Most elements of each stand-in of a call that may compute all of them; a matrix product then takes 0.1 s."""

_CHANGING_MEMORY = ("set_", "resize_as_", "resize_as_sparse_", "apply_", "map_", "map2_")
"""Methods that give a tensor other memory, or call a Python function."""


def is_write(func: TorchFunction, targets: Sequence[str]) -> bool:
    """True for a call that writes to a tensor, by its name, its schema or its `targets`; False for lists of tensors."""
    if targets:
        return True
    if isinstance(func, Operator):
        return bool(written_arguments(func)) and not name_of(func).startswith("_foreach_")
    name = name_of(func)
    if name.startswith("__"):
        return name == "__setitem__" or name in _IN_PLACE
    return name.endswith("_") and not name.startswith("_") and name not in _CHANGING_MEMORY


_IN_PLACE = frozenset(n for n in dir(Tensor) if n.startswith("__i") and hasattr(Tensor, f"__{n[3:]}"))
"""Names of the methods behind operators such as `+=`."""


def _name(func: TorchFunction) -> str:
    """Return the name of a function or of an operator, without its overload."""
    return name_of(func).split(".")[0]


def is_elementwise(func: TorchFunction) -> bool:
    """True if each element of the result follows from the operands' elements at the same place."""
    name = _name(func)
    if name in _COPYING or name.startswith("__"):
        return True
    packet = getattr(torch.ops.aten, name, None)
    tagged = packet is None or any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
    return tagged or _is_elementwise_in_trial(name)


@lru_cache(maxsize=1024)
def _is_elementwise_in_trial(name: str) -> bool:
    """Return the same from a trial of a method with one operand, because in-place operators may have no tags."""
    method = getattr(Tensor, name, None)
    operand = torch.tensor([0.25, 0.5, 0.75], device="cpu")
    others = operand + torch.eye(3, device="cpu") / 8  # each row differs from the operand in one element
    try:
        with torch.random.fork_rng(devices=[]), no_modes():
            expected = _trial(method, operand)
            return all(
                _trial(method, row).eq(expected)[torch.arange(3, device="cpu") != k].all()
                for k, row in enumerate(others)
            )
    except (RuntimeError, TypeError, IndexError):
        return False


def _trial(method: TorchValue, operand: Tensor) -> Tensor:
    torch.default_generator.manual_seed(0)
    return method(torch.tensor([0.5, 0.25, 1.0], device="cpu"), operand)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call with stand-ins for its tensors; `at` holds the tensors with common memory, the written one first.

    `written` holds the ids of all tensors that the call writes to.
    """

    func: TorchFunction
    args: Arguments
    kwargs: NamedArguments
    at: Sequence[DistTensor]
    written: set[int]
    stand_ins: dict[int, Tensor]

    def target(self) -> Tensor:
        """Return the stand-in of the elements that the call writes to."""
        whole = self.stand_ins[id(self.at[0])]
        if name_of(self.func) != "__setitem__" or any(True for _ in tensors_in(self.args[1])):
            return whole
        return whole[self.args[1]]

    def error_of_torch(self) -> str | None:
        """Return torch's error about shared memory; None if torch raises none, or if the trial would take long."""
        wholes = [one_element_stand_in(t, "cpu") for t in tensors_in((self.args, self.kwargs))]
        is_small = all(t.numel() <= _MOST_ELEMENTS for t in wholes)
        if not is_small and not is_elementwise(self.func):
            return None
        args, kwargs = map_tensors(self._stand_in, (self.args, self.kwargs))
        try:
            self.func(*args, **kwargs)
        except Exception as error:  # of other kinds for the numbers of the stand-ins
            return str(error) if str(error).startswith(_TORCH_TEXT) else None
        return None

    def _stand_in(self, t: Tensor) -> Tensor:
        if id(t) in self.stand_ins:
            return self.stand_ins[id(t)]
        alone = one_element_stand_in(t, "cpu")
        return torch.empty_like(alone, memory_format=torch.contiguous_format) if id(t) in self.written else alone


def check_overlap(
    func: TorchFunction, args: Arguments, kwargs: NamedArguments, targets: Sequence[str]
) -> tuple[Arguments, NamedArguments]:
    """Return the arguments of a call that writes, with a copy of an operand that the write would change too early.

    Raises OperationError if the call writes to elements that another operand has at other places.
    """
    given, written = list(tensors_in((args, kwargs))), _written(func, args, kwargs, targets)
    for x in written:
        if not isinstance(x, DistTensor) or type(x) is FakeDistTensor or x._away:
            continue
        call = _call_on_stand_ins(func, args, kwargs, _sharing(x, given), {id(t) for t in written})
        copied = [] if call is None else _operands_to_copy(call, bool(targets))
        args, kwargs = map_tensors(lambda t, copied=copied: t.clone() if id(t) in copied else t, (args, kwargs))
    return args, kwargs


def _written(func: TorchFunction, args: Arguments, kwargs: NamedArguments, targets: Sequence[str]) -> list[Tensor]:
    if targets:
        return list(tensors_in([kwargs[n] for n in targets]))
    if isinstance(func, Operator):
        names = {a.name for a in written_arguments(func)}
        placed = zip(func._schema.arguments, args, strict=False)
        return list(tensors_in([v for a, v in placed if a.name in names] + [kwargs[n] for n in names if n in kwargs]))
    return list(tensors_in(args[:1]))


def _sharing(written: DistTensor, given: Sequence[Tensor]) -> list[DistTensor]:
    """Return the written tensor and the operands that share its memory on one device, an operand once per use."""
    memory = _memory_of(written)
    found = [t for t in given if isinstance(t, DistTensor) and shares_storage(_memory_of(t), memory)]
    own = next(k for k, t in enumerate(found) if t is written)
    return [written, *found[:own], *found[own + 1 :]]


def _memory_of(x: DistTensor) -> DistTensor:
    """Return the tensor that has the memory of `x`: the base of a chain of views, or `x`."""
    while isinstance(x, DistView):
        x = x._outer._source.base
    return x


def _call_on_stand_ins(
    func: TorchFunction, args: Arguments, kwargs: NamedArguments, at: list[DistTensor], written: set[int]
) -> _Call | None:
    """Return the call on stand-ins; None if no operand has common memory, or a place is not known on this rank."""
    if len(at) < 2 and 0 not in at[0]._spec.full_strides:
        return None
    starts = {id(x): _start_of(x) for x in at}
    ends = [_end_of(x, start) for x in at if (start := starts[id(x)]) is not None]
    if len(ends) < len(at) or any(callable(x) for x in leaves_in((args, kwargs))):
        return None
    memory = reserved_memory(max(ends))
    with no_interception():
        stand_ins = {id(x): _in_memory(x, starts[id(x)] or 0, memory) for x in at}
    return _Call(func, args, kwargs, at, written, stand_ins)


def reserved_memory(size: int) -> Tensor:
    """Return bytes of virtual memory, which may be more than the machine has."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)


_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Flag of memory that the system does not promise; Python has had its name since 3.12."""


def _end_of(x: DistTensor, start: int) -> int:
    steps = zip(x._spec.shape, x._spec.full_strides, strict=True)
    return start + (1 + sum(max(n - 1, 0) * step for n, step in steps)) * x._spec.dtype.itemsize


def _in_memory(x: DistTensor, start: int, memory: Tensor) -> Tensor:
    spec = x._spec
    new = torch.empty(0, dtype=spec.dtype, device="cpu")
    return new.set_(memory.untyped_storage(), start // spec.dtype.itemsize, spec.shape, spec.full_strides)


def _start_of(x: DistTensor) -> int | None:
    """Return the first byte of the whole tensor in its memory; None if this rank does not know it."""
    if isinstance(x, DistView) and x._outer is x:
        start = _start_of(x._source.base)
        return None if start is None else start + _bytes_in_base(x._source)
    base: TorchValue = x._outer if isinstance(x, DistView) else None
    with no_interception():
        base = x._base if base is None else base
        if not isinstance(base, DistTensor):
            return None if x.storage_offset() else 0
    start = _start_of(base)
    with no_interception():
        item = base.element_size()
        local = int(x.storage_offset()) * x.element_size() - int(base.storage_offset()) * item
        steps = whole_distance(local // item, base.size(), base.stride(), base._spec.full_strides)
    return None if start is None else start + steps * item + local % item


def _bytes_in_base(source: ViewOrigin) -> int:
    """Return the distance in bytes from the first element of the whole base to that of the whole view."""
    spec = source.base._spec
    with no_interception(), torch.no_grad():
        memory = torch.empty_strided(spec.shape, spec.full_strides, dtype=spec.dtype, device="meta")
        view = source.result_for(lambda t: memory if t is source.base else one_element_stand_in(t, "meta"))
        return int(view.storage_offset()) * view.element_size()


def _operands_to_copy(call: _Call, reads_first: bool) -> list[int]:
    """Return the ids of operands to copy before the write. Raises OperationError for a call that has no defined result.

    `reads_first` is True for a call with `out=`, which computes all its results before it writes them.
    """
    with no_interception(), torch.no_grad():
        target = call.target()
        others = _meeting(call, target)
        if _is_harmless(call, target, [same for *_, same in others]):
            return []
        compared = [t for _, t, _ in others if t.dim() or _name(call.func) not in _COPYING]
        error = call.error_of_torch() if _may_raise(target, compared) else None
        if error is not None:
            raise _overlap_error(call, error)
        return [] if reads_first else [id(x) for x, t, same in others if _is_copied(call, target, t, same)]


def _meeting(call: _Call, target: Tensor) -> list[tuple[DistTensor, Tensor, bool]]:
    """Return the operands near the written elements, their stand-ins, and whether these are the written elements."""
    others = [(x, call.stand_ins[id(x)]) for x in call.at[1:]]
    return [(x, t, _is_same(target, t)) for x, t in others if _ranges_meet(target, t)]


def _is_harmless(call: _Call, target: Tensor, alike: Sequence[bool]) -> bool:
    """True if the written elements are distinct, or all operands with common memory are read at the same places."""
    return all(alike) and is_elementwise(call.func) if alike else 0 not in target.stride()


def _is_copied(call: _Call, target: Tensor, other: Tensor, same: bool) -> bool:
    """True for an operand to copy before the write, False for one that may stay; an error for any other overlap."""
    elementwise = is_elementwise(call.func)
    if (same and elementwise) or not _share_elements(target, other):
        return False
    if not elementwise and not other.dim():
        return not same  # a number, as in x.normal_(x[0]), which is read first
    copies = _name(call.func) in _COPYING
    if elementwise and (_is_ahead(target, other) or _keeps_read_elements(target, other, copies)):
        return True
    raise _overlap_error(call, "the result depends on the order in which a kernel visits the elements")


def _is_ahead(target: Tensor, other: Tensor) -> bool:
    """True for `x[:-1] = x[1:]`: a kernel in memory order reads each element of `other` before it writes to it."""
    ahead = other.data_ptr() > target.data_ptr()
    return ahead and target.shape == other.shape and target.stride() == other.stride()


def _keeps_read_elements(target: Tensor, other: Tensor, copies: bool) -> bool:
    """True if no shared element is read after it was changed.

    Either it is read only for the result at its own place, or the call copies elements, and each of these is copied to
    its own place, as in `x[:] = x[1]`.
    """
    start = min(target.data_ptr(), other.data_ptr())
    size = (max(_range(target)[1], _range(other)[1]) - start) // target.element_size()
    if target.dtype != other.dtype or size > MOST_UNITS:
        return False
    places = torch.full((size,), -1, device="cpu")
    own = torch.arange(target.numel(), device="cpu").view(target.shape)
    places.as_strided(target.shape, target.stride(), (target.data_ptr() - start) // target.element_size()).copy_(own)
    at = (other.data_ptr() - start) // target.element_size()
    read = places.as_strided(other.shape, other.stride(), at).expand(target.shape)
    kept = read.reshape(-1)[read.clamp(min=0)] if copies else own
    return bool(((read == -1) | (read == kept)).all())


def _may_raise(target: Tensor, others: Sequence[Tensor]) -> bool:
    """True if torch may find an overlap: it compares two tensors only if neither has gaps."""
    return 0 in target.stride() or (_has_no_gaps(target) and any(_has_no_gaps(t) for t in others))


def _has_no_gaps(x: Tensor) -> bool:
    """True if no two elements share memory, and there is no gap between them."""
    expected = 1
    for step, size in sorted((step, n) for n, step in zip(x.shape, x.stride(), strict=True) if n > 1):
        if step != expected:
            return False
        expected *= size
    return True


def _ranges_meet(a: Tensor, b: Tensor) -> bool:
    if not a.numel() or not b.numel():
        return False
    first, second = _range(a), _range(b)
    return first[0] < second[1] and second[0] < first[1]


def _range(x: Tensor) -> tuple[int, int]:
    reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()


def _is_same(a: Tensor, b: Tensor) -> bool:
    """True if both tensors are the same elements in the same order."""
    pairs = zip(a.shape, a.stride(), b.stride(), strict=False)
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and all(n == 1 or s == t for n, s, t in pairs)


def _share_elements(a: Tensor, b: Tensor) -> bool:
    steps = [step * x.element_size() for x in (a, b) for n, step in zip(x.shape, x.stride(), strict=True) if n > 1]
    unit = gcd(a.element_size(), b.element_size()) if a.element_size() != b.element_size() else gcd(*steps)
    if unit and a.element_size() == b.element_size() and (a.data_ptr() - b.data_ptr()) % unit:
        return False
    groups, pairs = shared_memory([a, b], 1)
    return bool(groups or pairs)


def _overlap_error(call: _Call, why: str) -> OperationError:
    operands = [repr(x._spec) for x in call.at[1:]]
    found = f"{call.at[0]._spec!r}, " + ("in which several elements share memory" if not operands else "")
    return OperationError(
        f"{name_of(call.func)}, which writes to a tensor",
        found + (f"and operands with elements of the same memory: {', '.join(operands)}" if operands else ""),
        why.split(". ")[0].split("\n")[0].strip(),
        "pass operand.clone() in place of the operand" if operands else "write to x.clone()",
    )
