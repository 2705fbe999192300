"""The distributed tensor: this rank's local tensor with a spec.

It *is* the local `torch.Tensor`, so autograd runs on local tensors in C++. Every torch function that is called on it
calls `__torch_function__`, which looks up the call's signature among the known plans.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import deepcopy
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from meshwright.comm import NoCommunicatorError, current_communicator
from meshwright.layout import Cache, Partial, Placement, ProcessMesh, Spec, TorchValue

from .._errors import OperationError, PickleError
from .._torch_call import Arguments, NamedArguments, TorchFunction
from ..torch_hooks import (
    FakeTensor,
    backward_running,
    interception_on,
    is_batched,
    jit_tracing,
    modes_active,
    no_interception,
    seen_below_autograd,
    transforming,
)
from .write_counts import note_sharing

Run = Callable[[TorchValue, TorchValue, TorchValue, TorchValue], TorchValue]
"""Function that carries out a call: `run(func, types, args, kwargs)`."""

Signature = tuple[Hashable, ...]
"""Key of a call, equal for all calls with the same plan."""

Dispatch = Callable[[TorchValue, TorchValue, TorchValue, TorchValue, Signature | None], TorchValue]

PLANS = Cache[Hashable, Run](8192)
"""Signature of a call → its plan. An entry takes about 20 KB; a training step has some hundred."""


pipelines = WeakSet[Any]()
"""The pipelines in this process, each a `StageOrder`."""

local_shape: Callable[[Tensor], torch.Size] = getattr(Tensor.shape, "__get__")  # noqa: B009 - stubs: a torch.Size
"""Return the shape of the local part; call it with interception off."""
wants_grad: Callable[[Tensor], bool] = getattr(Tensor.requires_grad, "__get__")  # noqa: B009 - stubs: a bool
"""Return `x.requires_grad`, faster than the attribute; call it with interception off."""
is_leaf: Callable[[Tensor], bool] = getattr(Tensor.is_leaf, "__get__")  # noqa: B009 - stubs: a bool
"""Return `x.is_leaf`, faster than the attribute; call it with interception off."""


class DistTensor(Tensor):
    """A tensor whose elements are distributed over a mesh; behaves as the whole tensor, holds this rank's part.

    `shape`, `dtype` and all operations are those of the whole tensor. `to_local()` is the part, `spec` is its layout.
    """

    _spec: Spec
    _away = False
    """True for tensors on a rank outside the mesh."""
    _viewing = False
    """True for views that are copies, since the part of the base on this rank differs from the part of the view."""
    _number = 0
    """Number of the computation that made the tensor (`computation_numbers`)."""
    _is_param: bool
    """Set on parameters; torch's `isinstance(x, nn.Parameter)` reads it."""
    _dispatch: Dispatch
    """Set by the dispatcher: finds, makes and carries out the plan of a call with a new signature."""
    _observed: Run
    """Carry out a call inside a transform of `torch.func`, a dispatch mode or a trace."""

    @classmethod
    def __torch_function__(
        cls,
        func: TorchFunction,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: NamedArguments | None = None,
    ) -> TorchValue:
        if transforming() or modes_active() or jit_tracing():
            return DistTensor._observed(func, types, args, kwargs)
        key = signature(func, args, kwargs) if kwargs else _short_signature(func, args)
        plan = PLANS.get(key)
        if plan is not None:
            return plan(func, types, args, kwargs)
        return DistTensor._dispatch(func, types, args, kwargs, key)

    @property
    def shape(self) -> torch.Size:  # pyright: ignore[reportIncompatibleVariableOverride] - no variable in C, either
        if not interception_on():
            return local_shape(self)
        if not seen_below_autograd():
            return self._spec.shape
        with no_interception():
            return local_shape(self)

    @property
    def ndim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] - see `shape`
        return len(self.shape)

    @property
    def spec(self) -> Spec:
        """The mesh, layout, global shape and dtype."""
        return self._spec

    @property
    def mesh(self) -> ProcessMesh:
        return self._spec.mesh

    @property
    def process_mesh(self) -> ProcessMesh:
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement along each mesh axis."""
        return self._spec.placements

    def to_local(self) -> Tensor:
        """Return this rank's part as a plain tensor that shares its memory and takes part in autograd."""
        self._read_again()
        local_reads.count += 1
        with no_interception():
            return self.as_subclass(Tensor).view_as(self)

    def _base_with_memory(self) -> DistTensor:
        """Return the tensor whose memory a write to this one reaches: the base of a view that is a copy."""
        return self

    def _read_again(self) -> None:
        """Read the values that were written to the base, if this tensor is a view that is a copy."""

    def __repr__(self, *, tensor_contents: object = None) -> str:
        with no_interception():
            local = repr(self.detach().as_subclass(Tensor))
        return f"DistTensor({self._spec!r} on {self._spec.mesh!r}; {self._held()}\n  {local})"

    def _held(self) -> str:
        rank = rank_or_none()
        if rank is None:
            return "a rank holds"
        if rank not in self._spec.mesh:
            return f"rank {rank} holds nothing"
        ranges = ", ".join(f"{start}:{start + size}" for start, size in self._spec.local_ranges(rank))
        held = f"[{ranges}]" if ranges else "the number"
        terms = ", ".join(placement.op for placement in self._spec.placements if isinstance(placement, Partial))
        return f"rank {rank} holds " + (f"a term ({terms}) of {held}" if terms else held)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PickleError(
            "pickling a DistTensor, or copy.copy of it",
            f"{self._spec!r} on {self._spec.mesh!r}",
            "each rank holds a part only, and a pickle would hold the part of one rank",
            "pickle mw.unshard_dtensor(x), the whole plain tensor, or save a checkpoint; in place of "
            "copy.copy(x), call copy.deepcopy(x) or x.detach()",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> DistTensor:
        if not self.is_leaf:
            raise OperationError(
                "copy.deepcopy",
                f"{self._spec!r}, which is not a leaf of the autograd graph",
                "a copy would lose the autograd history and so the gradient; torch refuses such a copy too",
                "copy x.detach(), or write x.clone() for a copy with the history",
            )
        return self._deep_copied(memo)

    def _deep_copied(self, memo: dict[int, Any]) -> DistTensor:
        """Return a deep copy, also of the base of a view, which may be no leaf."""
        found = memo.get(id(self))
        if found is None:
            self._read_again()
            is_param = self.__dict__.get("_is_param")
            grad = None if is_param else self.grad
            with no_interception():
                local = self._copied_part(memo).requires_grad_(self.requires_grad)
            found = as_part(local, self._spec.new if is_param else self._spec)
            if self._away:
                found.__class__ = type(self)
            if is_param:
                found._is_param = True
            if grad is not None:
                found.grad = grad.__deepcopy__(memo)
            memo[id(self)] = found
            if not is_param:
                self._copy_source(found, memo)
        return found

    def _copied_part(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy of the local part. Copies of parts that share memory share memory too, except for parameters.

        torch does the same: `nn.Parameter.__deepcopy__` clones.
        """
        if self._away or isinstance(self, FakeTensor) or self.__dict__.get("_is_param"):
            return self.detach().clone()
        storage = self.untyped_storage()
        new = torch.empty(0, dtype=self.dtype, device=self.device)
        new.set_(deepcopy(storage, memo), self.storage_offset(), self.size(), self.stride())
        note_sharing(new)
        return new

    def _copy_source(self, copy: DistTensor, memo: dict[int, Any]) -> None:
        """Make `copy` a view of the copied base, if this tensor is a view with its own memory."""

    __dlpack_c_exchange_api__ = None
    """Prevents exports of the memory from C without a call: callers fall back on `__dlpack__`."""

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]


class FakeDistTensor(DistTensor, FakeTensor):  # pyright: ignore[reportIncompatibleVariableOverride] - see `shape`
    """A distributed tensor whose part is a fake tensor: calls on it are recorded, and nothing is computed."""


def as_part(local: Tensor, spec: Spec) -> DistTensor:
    """Return `local` itself, turned into the distributed tensor of which it is this rank's part."""
    out: TorchValue = local
    if not isinstance(local, DistTensor):
        out.__class__ = FakeDistTensor if isinstance(local, FakeTensor) else DistTensor
    out._spec = spec
    return out


X = TypeVar("X", bound=Tensor)


def change_class(x: Tensor, kind: type[X]) -> X:
    """Return `x` itself, turned into a tensor of class `kind`."""
    changed: TorchValue = x
    changed.__class__ = kind
    return changed


def plain_view(x: Tensor) -> Tensor:
    """Return the local tensor as a plain torch.Tensor object; call it with interception off."""
    return x.as_subclass(Tensor) if type(x) is not Tensor else x


_MARKS: dict[type, Hashable] = {float: float, complex: complex}
_INTEGERS = frozenset({int})


def _short_signature(func: TorchFunction, args: Arguments) -> Signature | None:
    """Return `signature(func, args, None)`, fast for one to three distributed tensors, integers and a last None."""
    count = len(args)
    if count == 2:
        a, b = args
        if type(a) is DistTensor:
            kind = type(b)
            if kind is DistTensor:
                return func, a._spec, b._spec
            if kind is int:
                return func, a._spec, b
    elif count == 3:
        a, b, c = args
        if type(a) is DistTensor and (c is None or type(c) is int):
            kind = type(b)
            if kind is DistTensor:
                return func, a._spec, b._spec, c
            if kind is int:
                return func, a._spec, b, c
    elif count == 1 and type(args[0]) is DistTensor:
        return func, args[0]._spec
    return signature(func, args, None)


def signature(func: TorchFunction, args: Sequence[TorchValue], kwargs: NamedArguments | None) -> Signature | None:
    """Return a key that is equal for two calls with the same plan; None if there is none.

    Floats, also symbolic ones, count by their type: a learning rate that changes every step is one signature.
    """
    parts: list[Hashable] = [func]
    if kwargs:
        parts.append(tuple(kwargs))
        args = (*args, *kwargs.values())
    try:
        for value in args:
            kind = type(value)
            if kind is DistTensor:
                parts.append(value._spec)
            elif kind is int or kind is str or value is None:
                parts.append(value)
            elif kind is float:
                parts.append(float)
            elif kind is tuple and _are_integers(value):
                parts.append(value)  # no mark begins with an integer
            else:
                parts.append(_mark(value))
    except _NoSignature:
        return None
    return tuple(parts)


def _are_integers(values: tuple[object, ...]) -> bool:
    """True if all values are of the class `int`; for a few values a loop is faster than a set of their classes."""
    for n in values:
        if type(n) is not int:
            return False
    return True


class _LocalReads(threading.local):
    """Number of the calls of `to_local` in this thread."""

    def __init__(self) -> None:
        self.count = 0


local_reads = _LocalReads()


class _NoSignature(Exception):
    pass


def _mark(value: TorchValue) -> Hashable:
    kind = type(value)
    if kind is DistTensor:
        return value._spec
    if kind is int or kind is str or value is None:
        return value
    if kind is list or kind is tuple or kind is torch.Size:
        return (kind, *value) if _INTEGERS.issuperset(map(type, value)) else (kind, *map(_mark, value))
    if kind is Tensor:
        return _mark_tensor(value)
    if kind in _MARKS:
        return _MARKS[kind]
    if kind is bool:
        return (bool, value)
    if kind is slice:
        return (slice, _mark(value.start), _mark(value.stop), _mark(value.step))
    return _mark_other(value)


def _mark_other(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return _mark_tensor(value)
    if isinstance(value, torch.SymInt):
        return (torch.SymInt, value.node.shape_env, value.node.expr)
    if isinstance(value, torch.SymFloat):
        return torch.SymFloat
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)) or value is Ellipsis:
        return value
    raise _NoSignature


def _mark_tensor(value: Tensor) -> Hashable:
    """Return the mark of a tensor: a spec, or the shape and dtype of a plain dense tensor.

    A plain tensor with a gradient counts apart if there are pipelines, whose stages send the gradient to all ranks.

    Raises _NoSignature for other plain tensors, and inside a backward pass, where each call is checked again.
    """
    if isinstance(value, DistTensor):
        if value._away:
            return ("away", value._spec)
        if type(value) is FakeDistTensor:
            return value._spec
    elif backward_running() == -1 and type(value) in (Tensor, nn.Parameter):
        if value.layout is torch.strided and not value.is_nested and not is_batched(value):
            strides = None if value.is_contiguous() else value.stride()
            in_pipeline = value.requires_grad and torch.is_grad_enabled() and len(pipelines) > 0
            return (Tensor, value.shape, value.dtype, strides, in_pipeline)
    raise _NoSignature


def floats_in(args: Sequence[TorchValue], kwargs: NamedArguments | None) -> tuple[float | str, ...]:
    """Return the floats and complex numbers among the arguments as keys: NaN equals itself, and -0.0 is not 0.0."""
    found: list[float | str] = []
    _collect_floats((*args, *kwargs.values()) if kwargs else args, found)
    return tuple(found)


def _collect_floats(values: Iterable[TorchValue], found: list[float | str]) -> None:
    """Append the floats among `values` to `found`; the kinds of values are those of `_mark`."""
    for value in values:
        kind = type(value)
        if kind is float:
            found.append(value if value and value == value else repr(value))
        elif kind is complex:
            found.append(repr(value))
        elif kind is list or kind is tuple:
            _collect_floats(value, found)
        elif kind is slice:
            _collect_floats((value.start, value.stop, value.step), found)


def rank_or_none() -> int | None:
    """Return the rank of the caller; None outside of ranks."""
    try:
        return current_communicator().rank
    except NoCommunicatorError:
        return None


def local_rank() -> int:
    """Return the rank of the caller."""
    return current_communicator().rank
