"""Gradients of parameters that are pending sums over ranks: stored separately, and reduced together.

A parameter that is replicated over an axis but used differently on each rank gets its gradient as terms. Immediate
reduction costs one collective per parameter and per backward pass. Inside `Tensor.backward` the terms are stored here
instead. They are reduced in buckets when the optimizer, clipping or the user first reads any `.grad`. Gradient
accumulation over several passes is then one reduction.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor

from meshwright.comm import call_purpose, current_communicator
from meshwright.layout import Layout, Spec, TorchValue

from ..core.call_sites import is_backward, keep_call_site
from ..core.computation_numbers import collectives_of_call, collectives_of_gradient, keep_number
from ..torch_hooks import bare_apply, no_interception
from .convert import Move, convert_local

BUCKET_BYTES = 25 * 2**20


@dataclass(slots=True)
class _Pending:
    """Terms of one parameter's gradient: the parameter, the terms' spec, and their local sum so far.

    `number` identifies the backward passes that made them (`computation_numbers`).
    """

    leaf: Tensor
    spec: Spec
    terms: Tensor | None
    number: int

    def take(self) -> Tensor:
        """Return the terms and drop the reference to them."""
        terms, self.terms = self.terms, None
        assert terms is not None
        return terms


@dataclass(slots=True)
class _Reduction:
    """A reduction in flight: the parameters, None for one whose gradient was replaced, and a function that waits."""

    leaves: list[Tensor | None]
    sums: Callable[[], Sequence[Tensor]]

    def finish(self) -> None:
        """Wait for the gradients, and add them to those of the parameters."""
        with no_interception(), torch.no_grad():
            for leaf, grad in zip(self.leaves, self.sums(), strict=True):
                if leaf is not None:
                    leaf.grad = grad if leaf.grad is None else leaf.grad.add_(grad)


class _State(threading.local):
    def __init__(self) -> None:
        self.deferring = False
        self.waiting: dict[tuple[int, Spec], _Pending] = {}
        self.in_flight: list[_Reduction] = []


_state = _State()


class _Deferred(torch.autograd.Function):
    """Replicated → varying for a leaf: the identity, whose gradient waits to be reduced."""

    @staticmethod
    def forward(ctx: TorchValue, x: Tensor, how: Move) -> Tensor:
        ctx.leaf, ctx.how = x, how
        keep_call_site(ctx)
        keep_number(ctx)
        return x.view_as(x)

    @staticmethod
    def jvp(ctx: TorchValue, *tangents: Tensor) -> Tensor:
        return tangents[0].view_as(tangents[0])

    @staticmethod
    def backward(ctx: TorchValue, *grads: Tensor) -> tuple[Tensor | None, None]:
        back = ctx.how.transpose.of_dtype(grads[0].dtype)
        with no_interception(), collectives_of_gradient(ctx):
            return _Deferred._back(ctx, back, grads[0])

    @staticmethod
    def _back(ctx: TorchValue, back: Move, grad: Tensor) -> tuple[Tensor | None, None]:
        if not _state.deferring or torch.is_grad_enabled() or _is_watched(ctx.leaf):
            return back(grad), None
        _keep(ctx.leaf, back.src, grad)
        return None, None


is_backward(_Deferred.backward)
_deferred: Callable[[Tensor, Move], Tensor] = bare_apply(_Deferred)


def defer_reduction(x: Tensor, how: Move) -> Tensor:
    """Return `x`, a leaf, after `how`, which only makes it varying; the reduction of its gradient is deferred."""
    return _deferred(x, how)


def may_come_later(leaves: Sequence[Tensor]) -> bool:
    """True if the gradients of these parameters may be added after the backward pass that is running."""
    return _state.deferring and not torch.is_grad_enabled() and not any(map(_is_watched, leaves))


def add_later(leaves: Sequence[Tensor], sums: Callable[[], Sequence[Tensor]]) -> None:
    """Add the gradients that `sums` returns, after it has waited for them, to those of the parameters.

    Each reduction in flight holds the terms of its gradients. Call `finish_in_flight` first to limit that memory.
    """
    _state.in_flight.append(_Reduction([*leaves], sums))


def finish_in_flight() -> None:
    """Wait for the reductions in flight, and add their gradients."""
    while _state.in_flight:
        _state.in_flight.pop(0).finish()


def _is_watched(leaf: Tensor) -> bool:
    """True if hooks need the gradient as soon as it arrives."""
    with no_interception():
        return bool(leaf._backward_hooks) or bool(leaf._post_accumulate_grad_hooks)


def _keep(leaf: Tensor, spec: Spec, grad: Tensor) -> None:
    found = _state.waiting.get((id(leaf), spec))
    if found is None:
        _state.waiting[id(leaf), spec] = _Pending(leaf, spec, grad.detach(), call_purpose.what[0])
    else:
        found.terms = found.take() + grad
        found.number = hash((found.number, call_purpose.what[0]))


class deferring:  # entered in every step: a class is faster than a generator
    """Context in which backward passes keep the terms of parameters' gradients until `flush`, if that is `wanted`.

    The passes stay in the calling thread, on an accelerator too, because the terms are kept per thread.
    """

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        self._before, _state.deferring = _state.deferring, self._wanted
        self._threads = torch.autograd.set_multithreading_enabled(False)

    def __exit__(self, *error: object) -> None:
        self._threads.__exit__(*error)
        _state.deferring = self._before


def forget(leaf: Tensor) -> None:
    """Drop the terms of `leaf`, whose gradient is replaced."""
    for reduction in _state.in_flight:
        reduction.leaves = [None if each is leaf else each for each in reduction.leaves]
    if not _state.waiting:
        return
    for key in [k for k in _state.waiting if k[0] == id(leaf)]:
        del _state.waiting[key]


def flush() -> None:
    """Reduce every pending gradient, in buckets of equal reductions, and add it to `.grad` in place."""
    finish_in_flight()
    if _state.waiting:
        waiting, _state.waiting = list(_state.waiting.values()), {}
        _add_up(waiting)


def flush_read() -> None:
    """Reduce the pending gradients of parameters that already have a `.grad`.

    The program may hold that tensor.
    """
    _finish_read()
    with no_interception():
        read = {key: item for key, item in _state.waiting.items() if item.leaf.grad is not None}
    if read:
        _state.waiting = {key: item for key, item in _state.waiting.items() if key not in read}
        _add_up(list(read.values()))


def _finish_read() -> None:
    """Finish the reductions in flight of parameters that already have a `.grad`."""
    with no_interception():
        read = [r for r in _state.in_flight if any(leaf is not None and leaf.grad is not None for leaf in r.leaves)]
    for reduction in read:
        _state.in_flight.remove(reduction)
        reduction.finish()


def _add_up(waiting: Sequence[_Pending]) -> None:
    with no_interception(), torch.no_grad():
        for bucket in _buckets(waiting):
            leaves, numbers = [item.leaf for item in bucket], [item.number for item in bucket]
            with collectives_of_call("the gradients of parameters", leaves, numbers):
                sums = _reduced(bucket)
            for item, grad in zip(bucket, sums, strict=True):
                item.leaf.grad = grad if item.leaf.grad is None else item.leaf.grad.add_(grad)


def _buckets(waiting: Sequence[_Pending]) -> Iterator[list[_Pending]]:
    """Yield items with the same mesh, dtype and pending axes, in order, up to BUCKET_BYTES together."""
    groups: dict[Hashable, list[_Pending]] = {}
    filled: dict[Hashable, int] = {}
    for item in waiting:
        key = (item.spec.mesh, item.spec.dtype, item.spec.layout.partial)
        groups.setdefault(key, []).append(item)
        filled[key] = filled.get(key, 0) + (0 if item.terms is None else item.terms.nbytes)
        if filled[key] >= BUCKET_BYTES:
            del filled[key]
            yield groups.pop(key)
    yield from groups.values()


def bucket_of(frame: FrameType | None) -> Spec | None:
    """Return the spec of the first gradient in the bucket that the frame reduces; None if it reduces none."""
    while frame is not None and frame.f_code is not _reduced.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["first"]


def _reduced(bucket: Sequence[_Pending]) -> list[Tensor]:
    """Return the sums of a bucket's terms, by one all-reduce; the terms are released."""
    first = bucket[0].spec
    axes = first.layout.partial_axes
    found = [item.take() for item in bucket]
    if current_communicator().rank not in first.mesh:
        return found
    shapes = [terms.shape for terms in found]
    flat = torch.cat([terms.reshape(-1) for terms in found]) if len(found) > 1 else found[0].reshape(-1)
    found.clear()
    terms = Spec(first.mesh, Layout(((),), tuple((a, "sum") for a in axes)), flat.shape, flat.dtype)
    whole = convert_local(flat, terms, terms.with_layout(Layout(((),))))
    return [part.view(shape) for part, shape in zip(whole.split([s.numel() for s in shapes]), shapes, strict=True)]
