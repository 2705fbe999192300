"""Views that cannot be views of the local part.

`x[2:4]` of a tensor that is sharded along dim 0 has to be gathered, so it has its own memory. It is still a view: a
write to it must reach `x`, and a write to `x` must reach it. A DistView stores the call that made it. Before it is used
it is read again if its base was written to. After a write to it, its values are written back to the base.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import Node

from meshwright.layout import Spec, TorchValue, whole_of

from .._torch_call import Arguments, NamedArguments, TorchFunction
from ..conversion.convert import arranged, convert_local, on_same_memory, owned
from ..conversion.local_parts import spec_of, spec_of_whole, whole_local, whole_spec, write_into
from ..conversion.saved_operands import drop_notes, note_again, note_reading
from ..conversion.whole_call import call_whole, write_back_whole
from ..core.dist_tensor import DistTensor, FakeDistTensor, as_part, change_class, is_leaf, wants_grad
from ..core.tree import leaves_in, map_tensors, tensors_in
from ..core.write_counts import note_counter, version_of, writes_to
from ..planning.call_plan import of_one_node
from ..torch_hooks import is_dense, keep_bits, no_interception, shares_storage, transforming, transforms_paused
from .lost_history import without_gradient
from .view_origin import (
    ViewOrigin,
    last_written,
    one_element_stand_in,
    overlaps_itself,
    part_of_view,
    places_in_base,
    several_views_error,
    shares_elements,
)


class DistView(DistTensor):
    """A view of another distributed tensor that has its own memory.

    A local view of it (for example a slice along a dim that is not sharded) is a DistView too, with the same `_outer`.
    """

    _viewing = True
    _source: ViewOrigin
    _outside: DistView | None = None
    """The view whose memory this view shares, or None for an outer view; a reference cycle would delay its end."""
    _agreed: int
    """The number of writes to the memory of an outer view when it and its base last held the same values."""
    _seen = True
    """False for `view.detach()` and `view.data`: autograd does not see what is written to them."""
    _counted = True
    """False for `view.data`: a write to it changes no version counter of the base."""

    @property
    def _outer(self) -> DistView:
        """The view that stores its call: this view, or the one whose memory this view shares."""
        return self if self._outside is None else self._outside

    def _base_with_memory(self) -> DistTensor:
        return base_of(self)

    def _read_again(self) -> None:
        _refresh(self._outer)

    def _copy_source(self, copy: DistTensor, memo: dict[int, Any]) -> None:
        view = change_class(copy, DistView)
        view._seen, view._counted = self._seen, self._counted
        if self._outer is self:
            source = self._source
            copied = replace(source)
            copied.move_to(source.base._deep_copied(memo))
            copied.is_read()
            become_view(view, copied)
        else:
            outer: Any = self._outer._deep_copied(memo)
            view._outside = outer
            _note_view(view._outer, _INNER, view)


def as_view(
    x: DistTensor,
    base: DistTensor,
    func: TorchFunction,
    args: Arguments,
    kwargs: NamedArguments,
    at: int,
    single: bool = True,
) -> DistTensor:
    """Return `x`, result number `at` of a view call, as a view of `base`.

    A fake tensor stays as it is, because recorded programs do not write to views. If elements of `x` share memory, each
    gets memory of its own, so that the view can be read again; their spec still makes a write raise an error.
    """
    if type(x) is FakeDistTensor:
        return x
    tracked = torch.is_grad_enabled()
    with no_interception():
        alone = torch.clone if overlaps_itself(x) else partial(in_order, spec=x._spec)
        local = alone(x)
        if local is not x:
            local = keep_bits(alone, x) if x.is_conj() or x.is_neg() else local
            note_again(local, x, alone)
        view = as_part(_of_mode(local if tracked else owned(local), base.is_inference()), x._spec)
    now = version_of(base)
    source = ViewOrigin(base, func, args, kwargs, at, writes_to(base), single, tracked, shown=now, made=now)
    return become_view(view, source)


def _of_mode(x: Tensor, inference: bool) -> Tensor:
    """Return `x` as a tensor of inference mode or as a normal one: a view is what its base is."""
    if x.is_inference() == inference:
        return x
    with torch.inference_mode(inference):
        return x.clone() if inference else on_same_memory(x)


def become_view(x: DistTensor, source: ViewOrigin) -> DistView:
    """Make `x`, which has its own memory, the view that `source` describes; return it."""
    view = change_class(x, DistView)
    view._source, view._outside = source, None
    view._agreed = writes_to(view)
    _note_view(source.base, _VIEWS, view)
    return view


_VIEWS, _INNER = "_meshwright_views", "_meshwright_inner"
"""Attribute of a base: its views that are copies. Attribute of such a view: the views that share its memory."""


def _note_view(x: DistTensor, name: str, view: DistView) -> None:
    vars(x).setdefault(name, WeakValueDictionary())[id(view)] = view


def _pop_noted_views(x: DistTensor, name: str) -> list[DistView]:
    found: WeakValueDictionary[int, DistView] | None = vars(x).pop(name, None)
    return [] if found is None else list(found.values())


def _forget_view(view: DistView) -> None:
    """Undo `_note_view` for a view that gets other memory."""
    holder, name = (view._source.base, _VIEWS) if view._outside is None else (view._outside, _INNER)
    vars(holder).get(name, {}).pop(id(view), None)


def in_order(x: Tensor, spec: Spec) -> Tensor:
    """Return the part of a view with its dims in the same order in memory as the whole view; a copy if they differ.

    Which views of the view are possible then follows the whole view: `x[2:]` of a transposed `x` is gathered in
    row-major order, where `x[2:][:, 1]` has gaps that the whole view does not have.
    """
    if shares_elements(spec.full_strides, spec.shape):
        return x
    steps = [(whole, here) for n, whole, here in zip(x.shape, spec.full_strides, x.stride(), strict=True) if n > 1]
    if [here for _, here in sorted(steps)] == sorted(here for _, here in steps):
        return x
    return whole_of(x, spec.full_strides) if x.shape == spec.shape else arranged(x, spec)


def leave_memory(x: DistTensor) -> None:
    """Prepare `x` to move to other memory: its views become views of another tensor here, and `x` is no view."""
    views, inner = _pop_noted_views(x, _VIEWS), _pop_noted_views(x, _INNER)
    if views or inner:
        with no_interception(), torch.enable_grad():  # torch forbids writes to a view made under `no_grad`
            old: Any = as_part(x.view_as(x), x._spec)
        if isinstance(x, DistView):
            _become_old_view(old, x)
        for view in views:
            view._source.move_to(old)
            _note_view(old, _VIEWS, view)
        for view in inner:
            view._outside = old
            _note_view(old, _INNER, view)
    if type(x) is DistView:
        _forget_view(x)
        end_view(x)


def exchange_with_view(x: DistTensor, view: DistView, swap: Callable[[], None]) -> None:
    """Exchange `x` with its view `view`: `view` becomes the base, and `x` the view. `swap` exchanges the objects."""
    _forget_view(view)
    others = _pop_noted_views(x, _VIEWS)
    moved: Any = x
    try:
        swap()
    except BaseException:
        for other in others:
            _note_view(x, _VIEWS, other)
        raise
    for other in (*others, moved):
        other._source.move_to(view)
        _note_view(view, _VIEWS, other)


def _become_old_view(old: DistTensor, x: DistView) -> None:
    """Make `old`, which has the memory of `x`, the view that `x` is."""
    view = change_class(old, DistView)
    view._seen, view._counted, view._agreed, view._outside = x._seen, x._counted, x._agreed, x._outside
    if x._outside is None:
        view._source = x._source
        _note_view(x._source.base, _VIEWS, view)
    else:
        _note_view(x._outside, _INNER, view)


def end_view(x: DistView) -> None:
    """Make `x` a tensor that is no view of another one."""
    drop_notes(x)
    change_class(x, DistTensor)
    for name in ("_source", "_outside", "_agreed", "_seen", "_counted"):
        vars(x).pop(name, None)


def end_outer_view(view: DistView) -> None:
    """Make an outer view, and the views of its memory, tensors of their own: nothing else uses its base."""
    _forget_view(view)
    for inner in _pop_noted_views(view, _INNER):
        end_view(inner)
    end_view(view)


def inner_view(x: DistTensor, view: DistView) -> DistView:
    """Return `x`, which has the memory of `view` and a version counter of its own, as the same view."""
    found = change_class(x, DistView)
    found._outside, found._seen, found._counted = view._outer, False, False
    _note_view(view._outer, _INNER, found)
    return found


def detached_view(local: Tensor, view: DistView, is_data: bool) -> DistView:
    """Return `local`, which is this rank's part of `view.detach()` or `view.data`, as a view of the same base."""
    found = inner_view(as_part(local, view._spec), view)
    found._counted = view._counted and not is_data
    return found


def base_of(x: DistTensor) -> DistTensor:
    """Return the tensor at the base of a chain of copied views; `x` itself if it is no copied view."""
    while isinstance(x, DistView):
        x = x._outer._source.base
    return x


def counted_with(x: DistTensor) -> DistTensor:
    """Return the tensor whose version counter moves with writes to `x`: the base of a view."""
    while isinstance(x, DistView) and x._outer._counted:
        x = x._outer._source.base
    return x


def is_unversioned(x: Tensor) -> bool:
    """True for a tensor that was made in inference mode, whose writes are not counted."""
    with no_interception():
        return x.is_inference()


def run_whole(func: TorchFunction, args: Arguments, kwargs: NamedArguments) -> TorchValue:
    """Return `func` of the whole tensors; results are replicated, and views of gathered arguments stay views.

    A sparse or nested result is a plain tensor, the same on every rank, because layouts only divide dense memory.
    """
    done = call_whole(func, args, kwargs)
    like = next(t._spec for t, _ in done.pairs if isinstance(t, DistTensor))
    made: dict[int, Tensor] = {id(w): t for t, w in done.pairs}
    results = list(tensors_in(done.out))
    single = not of_one_node(results)
    for at, r in enumerate(results):
        if id(r) in made:
            continue
        if not is_dense(r):
            made[id(r)] = r
            continue
        with no_interception():
            spec = spec_of_whole(r, like.mesh)
            base = next((t for t, w in done.gathered() if shares_storage(r, w)), None)
        out = as_part(r, spec)
        made[id(r)] = out if base is None else as_view(out, base, func, args, kwargs, at, single)
    return map_tensors(lambda r: made[id(r)], done.out)


def break_view(
    out: TorchValue,
    func: TorchFunction,
    args: Arguments,
    kwargs: NamedArguments,
    place: int,
    single: bool,
) -> TorchValue:
    """Return the results of a view call whose tensor argument number `place` was moved, as views of that argument."""
    moved = list(tensors_in((args, kwargs)))[place]
    like = next(r for r in tensors_in(out) if isinstance(r, DistTensor))
    base = moved if isinstance(moved, DistTensor) else as_part(moved.detach(), spec_of(moved, like._spec))
    args, kwargs = map_tensors(lambda t: base if t is moved else one_element_stand_in(t), (args, kwargs or {}))
    at = count()
    single = single or not (torch.is_grad_enabled() and base.requires_grad)

    def viewed(r: Tensor) -> Tensor:
        number = next(at)
        return as_view(r, base, func, args, kwargs, number, single) if isinstance(r, DistTensor) else r

    return map_tensors(viewed, out)


def before_call(views: Sequence[DistView]) -> list[int]:
    """Read again every view whose base was written to; return the numbers of writes to the views."""
    for view in views:
        _refresh(view._outer)
    return [writes_to(v) for v in views]


def after_call(
    views: Sequence[DistView], before: Sequence[int], out: TorchValue, written: Sequence[Tensor] = ()
) -> None:
    """Write back every view that was written to since `before`, and mark local views of views as such.

    `written` are the views that the call writes to, for tensors of inference mode, which have no versions.
    """
    for view, version in zip(views, before, strict=True):
        if not view._viewing:  # the call gave it other memory
            continue
        if writes_to(view) not in (version, view._outer._agreed) or any(x is view for x in written):
            _write_back(view._outer, view)
    for r in tensors_in(out):
        if type(r) is DistTensor:
            _know_inner(r, views)


def before_function(views: Sequence[DistView]) -> list[Node | None]:
    """Read again every view whose base was written to; return the views' autograd nodes, for `after_function`."""
    for view in views:
        _refresh(view._outer)
    with no_interception():
        return [view.grad_fn for view in views]


def after_function(views: Sequence[DistView], nodes: Sequence[Node | None]) -> None:
    """Write back every view that an autograd function marked as written.

    The function's own writes are written back without gradients; the view gets its new node only after them.
    """
    for view, node in zip(views, nodes, strict=True):
        with no_interception():
            is_written = view.grad_fn is not node
        if is_written:
            _write_back(view._outer, view)


def _know_inner(x: DistTensor, views: Sequence[DistView]) -> None:
    with no_interception():
        owner = next((v for v in views if v._viewing and shares_storage(v, x)), None)
    if owner is not None:
        view = inner_view(x, owner)
        view._seen, view._counted = owner._seen, owner._counted


def _refresh(view: DistView) -> None:
    source = view._source
    if isinstance(source.base, DistView):
        _refresh(source.base._outer)
    if not is_behind(view):
        return _refuse_gradients(view)
    if not source.single:
        raise several_views_error(source, "a view whose base, or another view of it, was written to")
    with transforms_paused() if transforming() else nullcontext():  # a backward pass inside a transform reads it again
        _read(view, source)


def _read(view: DistView, source: ViewOrigin) -> None:
    """Give an outer view the values that its base has now."""
    _leave_leaf(view)
    is_shown = version_of(source.base) != source.shown
    with _grad_mode(view) if is_shown else torch.no_grad():
        done = call_whole(source.func, source.args, source.kwargs)
        new = source.result_in(done.out)
        target = view if view._seen and is_shown else _data_of(view)  # a write to `base.data` is one to `view.data`
        write_into(target, as_part(new, _whole_spec_of(new, view)))
        with no_interception():
            _reread.with_history |= wants_grad(view)
    source.is_read()
    if is_shown:
        _refuse_gradients(view)
        _note_reading(view)
    view._agreed = writes_to(view)


def has_lost_history(view: DistView) -> bool:
    """True if the view was made without a history, and a write gave one to its base, which the view cannot get."""
    source = view._outer._source
    if source.tracked or not may_require_grad(view):
        return False
    with no_interception():
        return wants_grad(source.base) and version_of(source.base) != source.made


def _refuse_gradients(view: DistView) -> None:
    """Give a view that lost its history one whose backward pass raises an error, as torch does at the next use."""
    if not has_lost_history(view):
        return
    with no_interception(), torch.inference_mode(False), torch.enable_grad():
        if not wants_grad(view):
            value = view.detach().as_subclass(Tensor).requires_grad_()
            view.copy_(without_gradient(value, view._spec))
            view._agreed = writes_to(view)


def _leave_leaf(view: DistView) -> None:
    """Make a view that is a leaf of its own a normal view, if its base has a history now."""
    if may_require_grad(view):
        with no_interception():
            if wants_grad(view) and is_leaf(view) and wants_grad(view._source.base):
                view.requires_grad_(False)


class _Reread(threading.local):
    """A note for each rank: True once a view with a gradient history was read again. Simulated ranks are threads."""

    with_history = False


_reread = _Reread()


def any_reread_with_history() -> bool:
    """True if a view with a gradient history was read again on this rank.

    Autograd can go through that copy only once.
    """
    return _reread.with_history


def is_behind(view: DistView) -> bool:
    """True if the base of an outer view may have been written to since the view was read."""
    source = view._source
    return writes_to(source.base) != source.version or not source.counted or is_unversioned(view)


def _grad_mode(view: DistView) -> AbstractContextManager[None]:
    """Return the context in which an outer view is read again: `no_grad` at its next use must not lose its history."""
    source = view._source
    if view.is_inference():
        return torch.inference_mode()
    if not source.tracked:
        return torch.no_grad()
    with no_interception():
        if wants_grad(source.base):
            return torch.inference_mode(False)
        is_own_leaf = wants_grad(view) and is_leaf(view)  # made by `view.requires_grad_()`: the base has no history
    return torch.no_grad() if is_own_leaf else nullcontext()


def may_require_grad(view: DistView) -> bool:
    """False for a view that autograd does not see, such as one that reads the memory as another dtype."""
    source, dtype = view._outer._source, view._spec.dtype
    if not view._seen or not (dtype.is_floating_point or dtype.is_complex):
        return False
    if view._outside is not None:
        with no_interception():
            if not view._is_view():
                return False
    return not any(isinstance(x, torch.dtype) for x in leaves_in((source.args, source.kwargs)))


def _write_back(view: DistView, by: DistView, written: Tensor | None = None) -> None:
    """Write the values of an outer view to its base, with the effect of a write to `by`, a view on the same memory.

    `written` marks the elements of `by` that were written; None means all of them.
    """
    ends = view._source.ends
    if ends is not None and ends(view):
        return end_outer_view(view)
    with nullcontext() if may_require_grad(by) else torch.no_grad():
        _write_base(view, by, written)


def _write_base(view: DistView, by: DistView, written: Tensor | None) -> None:
    source = view._source
    value = whole_local(view)
    done = call_whole(source.func, source.args, source.kwargs)
    whole = done.whole_argument(source.base)
    base = source.base if isinstance(source.base, DistView) else None
    repeats = base is not None and shares_elements(base._outer._spec.full_strides, base._outer._spec.shape)
    with no_interception():
        target = source.result_in(done.out)
        overlaps = overlaps_itself(target)
        places = _written_places(view, by, written) if overlaps or repeats else None
        if overlaps and places is not None:
            whole = last_written(source, done, whole, value, places)
        else:
            target.copy_(value)
    write_back_whole(source.base if by._counted else _data_of(source.base), whole)
    if base is not None:
        below = None if places is None else places_in_base(source, done, places)
        _write_back(base._outer, min(by, base, key=_visibility), below)
    if source.single:
        source.is_read()
        if overlaps or _lacks_history(view):  # other elements of the view changed, too; or its history did
            source.version = source.shown = _UNKNOWN
    view._agreed = writes_to(view)
    _note_reading(view)


def _lacks_history(view: DistView) -> bool:
    """True if the base got a history after the view was made: on one device the write gives it to the view."""
    if not (view._source.tracked and may_require_grad(view)):
        return False
    with no_interception():
        return wants_grad(view._source.base) and not wants_grad(view)


def _note_reading(view: DistView) -> None:
    """Note an outer view that now holds the values of its base, because autograd may save it for a backward pass."""
    if view._counted:  # a write to the base of any other view, such as `x.data = y`, moves no counter of the view
        with no_interception():
            note_reading(view, view._source.base, partial(part_of_view, view._source, view._spec))


_UNKNOWN = -1
"""A number of writes that no tensor has, so that the view is read again before its next use."""


def _written_places(view: DistView, by: DistView, written: Tensor | None) -> Tensor:
    """Return for each element of the whole outer view whether it was written, by elements `written` of `by`."""
    layout = replace(view._spec.layout, partial=())
    local = torch.empty_strided(view.size(), view.stride(), dtype=torch.bool, device=view.device).fill_(False)
    inner = local.as_strided(by.size(), by.stride(), int(by.storage_offset()) - int(view.storage_offset()))
    if written is None:
        inner.fill_(True)
    else:
        whole = whole_spec(by._spec).contiguous.with_dtype(torch.bool)
        inner.copy_(convert_local(written, whole, whole.with_layout(replace(by._spec.layout, partial=()))))
    spec = view._spec.contiguous.with_dtype(torch.bool).with_layout(layout)
    return convert_local(local.contiguous(), spec, whole_spec(spec))


def _visibility(view: DistView) -> int:
    """Return how visible a write to the view is for torch: 2 for a view, 1 for `view.detach()`, 0 for `view.data`."""
    return view._seen + view._counted


def _data_of(x: DistTensor) -> DistTensor:
    """Return `x.data`, whose writes are counted separately from those of `x`."""
    with no_interception():
        data = x.data
        note_counter(x, data)
    return as_part(data, x._spec)


def _whole_spec_of(new: Tensor, like: DistTensor) -> Spec:
    with no_interception():
        return spec_of(new, like._spec)
