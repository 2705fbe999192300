"""Views that cannot be views of the local part.

`x[2:4]` of a tensor that is cut along dim 0 has to be gathered, so it has memory of its own. It is still a view:
what is written into it must reach `x`, and what is written into `x` must reach it. A DistView remembers the call
that made it; before it is used it is read again if its base was written to, after it was written to it is written back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import Spec, replicated

from ._dist_tensor import DistTensor, FakeDistTensor, stamp
from ._local import spec_of, whole_local, write_into
from ._tree import map_tensors, tensors_in
from ._whole import call_whole, put_back
from .torch_hooks import is_dense, no_interception, shares_storage


@dataclass(slots=True)
class Source:
    """Where a view comes from: the base, the call that made it, which result it is, and the base's version then."""

    base: DistTensor
    func: Any
    args: Any
    kwargs: Any
    at: int
    version: int


class DistView(DistTensor):
    """A distributed tensor that has memory of its own and yet is a view of another one.

    A local view of it (a slice along a dim that is not cut, say) is one too, with the same `_outer`.
    """

    _viewing = True
    _source: Source
    _outer: DistView

    def _read_again(self) -> None:
        _refresh(self._outer)


def as_view(x: DistTensor, base: DistTensor, func: Any, args: Any, kwargs: Any, at: int) -> DistTensor:
    """`x`, the result number `at` of a call that takes a view of `base`, made a view of it.

    A fake tensor stays what it is: programs do not write.
    """
    if type(x) is FakeDistTensor:
        return x
    view: Any = x
    view.__class__ = DistView
    view._source = Source(base, func, args, kwargs, at, version_of(base))
    view._outer = view
    return view


def version_of(x: Tensor) -> int:
    """How often the memory of `x` was written to."""
    with no_interception():
        return 0 if x.is_inference() else x._version


def run_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """`func` on the whole tensors; results are replicated, and views of gathered arguments are views still.

    A sparse or nested result is a plain tensor, the same on every rank: layouts divide dense memory.
    """
    done = call_whole(func, args, kwargs)
    like = next(t._spec for t, _ in done.pairs if isinstance(t, DistTensor))
    made: dict[int, Tensor] = {id(w): t for t, w in done.pairs}
    results = list(tensors_in(done.out))
    for at, r in enumerate(results):
        if id(r) in made:
            continue
        if not is_dense(r):
            made[id(r)] = r
            continue
        with no_interception():
            spec = Spec(like.mesh, replicated(r.dim()), r.shape, r.dtype)
            base = next((t for t, w in done.gathered() if shares_storage(r, w)), None)
        made[id(r)] = stamp(r, spec)
        if base is not None:
            as_view(stamp(r, spec), base, func, args, kwargs, at)
    return map_tensors(lambda r: made[id(r)], done.out)


def break_view(out: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The results of a view call whose operand had to move, made views of that operand."""
    base = next(t for t in tensors_in((args, kwargs)) if isinstance(t, DistTensor))
    for at, r in enumerate(list(tensors_in(out))):
        if isinstance(r, DistTensor):
            as_view(r, base, func, args, kwargs or {}, at)
    return out


def before_call(views: Sequence[DistView]) -> list[int]:
    """Reads again every view whose base was written to; their versions."""
    for view in views:
        _refresh(view._outer)
    return [version_of(v) for v in views]


def after_call(views: Sequence[DistView], before: Sequence[int], out: Any) -> None:
    """Writes every view back that was written to since `before`, and makes local views of views known as such."""
    for view, version in zip(views, before, strict=True):
        if version_of(view) != version:
            _write_back(view._outer)
    for r in tensors_in(out):
        if type(r) is DistTensor:
            _know_inner(r, views)


def _know_inner(x: DistTensor, views: Sequence[DistView]) -> None:
    with no_interception():
        outer = next((v._outer for v in views if shares_storage(v, x)), None)
    if outer is not None:
        view: Any = x
        view.__class__ = DistView
        view._outer = outer


def _refresh(view: DistView) -> None:
    source = view._source
    if isinstance(source.base, DistView):
        _refresh(source.base._outer)
    now = version_of(source.base)
    if now == source.version:
        return
    done = call_whole(source.func, source.args, source.kwargs)
    new = list(tensors_in(done.out))[source.at]
    write_into(view, stamp(new, _whole_spec_of(new, view)))
    source.version = now


def _write_back(view: DistView) -> None:
    source = view._source
    value = whole_local(view)
    done = call_whole(source.func, source.args, source.kwargs)
    whole = next(w for t, w in done.pairs if t is source.base)
    with no_interception():
        target = list(tensors_in(done.out))[source.at]
        if _overlaps(target):
            whole = _last_written(source, whole, value)
        else:
            target.copy_(value)
    put_back(source.base, whole)
    if isinstance(source.base, DistView):
        _write_back(source.base._outer)
    source.version = version_of(source.base)


def _overlaps(x: Tensor) -> bool:
    """True when two elements of `x` may lie at one place in memory."""
    reach = 0
    for step, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and step <= reach:
            return True
        reach += step * (size - 1)
    return False


def _last_written(source: Source, whole: Tensor, value: Tensor) -> Tensor:
    """`whole` after `value` was written into its view: of the elements that lie at one place the last one counts.

    Only that one has a gradient; the view of a tensor of place numbers tells which elements lie where.
    """
    places = torch.empty_strided(whole.shape, whole.stride(), dtype=torch.int64, device=whole.device)
    places.copy_(torch.arange(whole.numel(), device=whole.device).reshape(whole.shape))
    args, kwargs = map_tensors(lambda t: places if t is source.base else t, (source.args, source.kwargs))
    seen = list(tensors_in(source.func(*args, **kwargs)))[source.at].reshape(-1)
    last = torch.full((whole.numel(),), -1, device=whole.device)
    last = last.scatter_reduce(0, seen, torch.arange(len(seen), device=whole.device), "amax").reshape(whole.shape)
    return torch.where(last < 0, whole, value.reshape(-1)[last.clamp(min=0)])


def _whole_spec_of(new: Tensor, like: DistTensor) -> Spec:
    with no_interception():
        return spec_of(new, like._spec)
