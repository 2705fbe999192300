"""Values of tensors during recording, including tensors that are written to, directly or through a view.

Programs have no in-place operators. A write gives the tensor a new value. If the tensor is a view, the new value is
scattered into the value of its base. Other views of the same memory are recomputed when they are read next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import TorchValue, user_frame

from .._errors import CaptureError
from ..program.effects import returns_memory_of_arguments, writes_to
from ..program.node import Op, Overwrite, Value
from ..torch_hooks import Operator

aten = torch.ops.aten
Emit = Callable[..., Any]
"""`emit(op, args, kwargs, shown)` adds a node and returns its value; the tensor `shown` has the result's metadata."""


@dataclass(slots=True)
class TensorMemory:
    """Memory that several tensors share, with the number of writes to it."""

    version: int = 0


@dataclass(frozen=True, slots=True)
class TensorView:
    """The view operation that made a tensor: `op(*args)` returned `shown`, with the base tensor's cell in `args`.

    The tensor is `shown` itself, or the element `at` of it.
    """

    op: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    base: Cell
    shown: TorchValue
    at: int | None

    @property
    def detaches(self) -> bool:
        """True if gradients do not pass through this view."""
        return self.op._schema.name.split("::")[1] in ("detach", "data")


@dataclass(slots=True, eq=False)
class Cell:
    """The latest value of a tensor, valid for one version of its memory. `like` is a tensor with the same metadata.

    `trained` is True once a value that requires gradients was written: `like.requires_grad` does not show such writes.
    """

    value: Value
    memory: TensorMemory
    like: Tensor
    version: int = 0
    view: TensorView | None = None
    trained: bool = False

    @property
    def requires_grad(self) -> bool:
        return self.trained or self.like.requires_grad

    @property
    def root(self) -> Cell:
        """The cell at the end of the chain of views; the cell itself if it is not a view."""
        return self if self.view is None else self.view.base.root

    @property
    def is_detached(self) -> bool:
        """True if this view, or a view that it is based on, passes no gradients."""
        return self.view is not None and (self.view.detaches or self.view.base.is_detached)

    def read(self, emit: Emit) -> Value:
        """Return the current value; a view is recomputed if its memory was written to since the last read."""
        if self.version != self.memory.version and self.view is not None:
            base = self.view.base
            args = tuple(base.read(emit) if a is base else a for a in self.view.args)
            out = emit(self.view.op, args, self.view.kwargs, self.view.shown)
            self.value = out if self.view.at is None else out[self.view.at]
        self.version = self.memory.version
        return self.value

    def write(self, value: Value, emit: Emit, trained: bool = False) -> None:
        """Write `value` to this cell, and update the bases of the view so that all tensors of the memory see it.

        `trained` says that `value` requires gradients.
        """
        chain: list[tuple[Cell, TensorView, Value]] = []
        cell = self
        while cell.view is not None:
            chain.append((cell, cell.view, cell.view.base.read(emit)))
            cell = cell.view.base
        self.memory.version += 1
        self.value, self.version, self.trained = value, self.memory.version, self.trained or trained
        for child, view, base_value in chain:
            view.base.value = _put_back(child, view, base_value, emit)
            trained = trained and not view.detaches
            view.base.version, view.base.trained = self.memory.version, view.base.trained or trained

    def write_beside_gradients(self, value: Value, emit: Emit) -> None:
        """Write `value` without gradients: the root tensor has new elements and keeps its previous gradient."""
        root = self.root
        before = root.read(emit)
        self.write(value, emit)
        if root.requires_grad:
            with torch.enable_grad():
                root.value = _with_gradient_of(before, root.value, root.like, emit)
            self.memory.version += 1
            root.version = self.memory.version


def _put_back(child: Cell, view: TensorView, base: Value, emit: Emit) -> Value:
    """Return the value of the base of `view` with the child's value written into the viewed elements."""
    value, like = child.value, view.base.like
    name = view.op._schema.name.split("::")[1]
    if name in _SAME_TENSOR:
        return _with_gradient_of(base, value, like, emit) if view.base.requires_grad and view.detaches else value
    if name in _INVERSE_VIEWS:
        op, args = _INVERSE_VIEWS[name](view)
        return emit(op, (value, *args), {}, like)
    if name in _SCATTERS:
        return _scattered(_SCATTERS[name], child, view, base, emit)
    if like.dtype != child.like.dtype or (name == "as_strided" and not _is_plain(like)):
        raise CaptureError(
            f"recording {user_frame() or 'a program'}",
            f"a write to the view that {name} makes of a tensor",
            "the written elements cannot be put back into the tensor",
            "make a new tensor (torch.where, torch.cat) instead of the write",
        )
    return _put_back_by_index(child, view, base, emit)


def _scattered(op: Operator, child: Cell, view: TensorView, base: Value, emit: Emit) -> Value:
    """Return `base` with the child's slice scattered into it.

    Complex slices are scattered as pairs of real numbers, since torch has no gradient for complex scatters.
    """
    like, value = view.base.like, child.value
    if not like.is_complex() or op is aten.diagonal_scatter.default:
        return emit(op, (base, value, *view.args[1:]), view.kwargs, like)
    names = [argument.name for argument in view.op._schema.arguments]
    given: dict[str, Any] = dict(zip(names[1:], view.args[1:], strict=False)) | dict(view.kwargs)
    pairs = torch.view_as_real(like)
    into = emit(aten.view_as_real.default, (base,), {}, pairs)
    part = emit(aten.view_as_real.default, (value,), {}, torch.view_as_real(child.like))
    out = emit(op, (into, part), given | {"dim": given.get("dim", 0) % like.dim()}, pairs)
    return emit(aten.view_as_complex.default, (out,), {}, like)


def _is_plain(x: Tensor) -> bool:
    return x.is_contiguous() and x.storage_offset() == 0


def _with_gradient_of(base: Value, value: Value, like: Tensor, emit: Emit) -> Value:
    """Return `value` with the gradient of `base`, as after a write through `x.data` or `x.detach()`."""
    detached = emit(aten.detach.default, (base,), {}, like)
    nothing = emit(aten.sub.Tensor, (base, detached), {}, like)
    return emit(aten.add.Tensor, (value, nothing), {}, like)


def _put_back_by_index(child: Cell, view: TensorView, base: Value, emit: Emit) -> Value:
    """Return `base` with the child's elements put back, for any kind of view.

    The same view of an index tensor (`arange`) gives the position of every element of the child.
    """
    like, size = view.base.like, view.base.like.numel()
    numbers = torch.empty(size, dtype=torch.int64, device=like.device)
    at = emit(aten.arange.default, (size,), {"device": like.device}, numbers)
    at = emit(aten.reshape.default, (at, tuple(like.shape)), {}, numbers.reshape(like.shape))
    shown = emit(view.op, (at, *view.args[1:]), view.kwargs, _as_numbers(view.shown))
    at = shown if view.at is None else shown[view.at]
    return emit(aten.put.default, (base, at, child.value), {}, like)


def _as_numbers(shown: TorchValue) -> TorchValue:
    if isinstance(shown, (tuple, list)):
        return [_as_numbers(x) for x in shown]
    return torch.empty(tuple(shown.shape), dtype=torch.int64, device=shown.device)


_SAME_TENSOR = ("detach", "alias", "data")
"""View operators whose result is the tensor itself."""

_SCATTERS: dict[str, Operator] = {
    "slice": aten.slice_scatter.default,
    "select": aten.select_scatter.default,
    "diagonal": aten.diagonal_scatter.default,
}
"""View operators that select a part, and the operator that scatters the part back."""


def _reshaped(view: TensorView) -> tuple[Operator, tuple[Any, ...]]:
    if view.op is aten.view.dtype:
        return aten.view.dtype, (view.base.like.dtype,)
    return aten.reshape.default, (tuple(view.base.like.shape),)


_INVERSE_VIEWS: dict[str, Callable[[TensorView], tuple[Operator, tuple[Any, ...]]]] = {
    "view": _reshaped,
    "_unsafe_view": _reshaped,
    "reshape": _reshaped,
    "flatten": _reshaped,
    "unflatten": _reshaped,
    "unsqueeze": _reshaped,
    "squeeze": _reshaped,
    "view_as": _reshaped,
    "t": lambda view: (aten.t.default, ()),
    "numpy_T": lambda view: (aten.permute.default, (tuple(reversed(range(view.base.like.dim()))),)),
    "transpose": lambda view: (aten.transpose.int, view.args[1:]),
    "permute": lambda view: (aten.permute.default, (_inverse(view.args[1]),)),
    "view_as_real": lambda view: (aten.view_as_complex.default, ()),
    "view_as_complex": lambda view: (aten.view_as_real.default, ()),
}
"""View operators that keep every element, and functions that return the inverse view."""


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    found = [0] * len(order)
    for at, dim in enumerate(order):
        found[dim % len(order)] = at
    return tuple(found)


FRESH = frozenset({"lift_fresh"})
IDENTITIES = frozenset({"detach", "alias", "lift_fresh", "detach_"})
"""Operators whose result is the argument itself, once gradients are explicit."""


@lru_cache(maxsize=4096)
def functional(op: Operator) -> Operator | None:
    """Return the out-of-place form of an in-place operator (`add` for `add_`) with the same arguments, or None."""
    namespace, name = op._schema.name.split("::")
    if name == "copy_":
        return aten.copy.default
    stem = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    packet = getattr(getattr(torch.ops, namespace), stem, None)
    if packet is None:
        return None
    for overload in packet.overloads():
        found = getattr(packet, overload)
        if _same_arguments(found, op):
            return found
    return None


def _same_arguments(found: Operator, op: Operator) -> bool:
    ours = [(a.name, str(a.type)) for a in found._schema.arguments]
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in found._schema.arguments)
    return not writes and ours == [(a.name, str(a.type)) for a in op._schema.arguments]


def overwriting(op: Op) -> Operator | Overwrite | None:
    """Return the in-place form of an operator (`add_` for `add`) with the same arguments, or None."""
    return _overwriting(op) if isinstance(op, Operator) else None


@lru_cache(maxsize=4096)
def _overwriting(op: Operator) -> Operator | Overwrite | None:
    if returns_memory_of_arguments(op):
        return None
    namespace, name = op._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    twin: Operator | None = getattr(packet, op._overloadname, None) if packet is not None else None
    if twin is None or functional(twin) is not op or writes_to(twin) != (0,):
        return None
    return twin if twin._schema.returns else Overwrite(twin, (0,))
