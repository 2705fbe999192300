"""Gradients of parameters that are pending sums over ranks: stored separately, and reduced together.

A parameter that is replicated over an axis but used differently on each rank gets its gradient as terms. Immediate
reduction costs one collective per parameter and per backward pass. Inside `Tensor.backward` the terms are stored here
instead. They are reduced in buckets when the optimizer, clipping or the user first reads any `.grad`. Gradient
accumulation over several passes is then one reduction. On devices with streams, full buckets start during the last
pass (`early_buckets`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from meshwright.comm import call_purpose
from meshwright.layout import Spec, TorchValue, device_types, platform_of

from ..core.call_sites import is_backward, keep_call_site
from ..core.computation_numbers import collectives_of_gradient, keep_number
from ..torch_hooks import FakeTensor, bare_apply, no_interception
from .convert import Move
from .early_buckets import CountedTerms, EarlyBuckets
from .gradient_buckets import PendingTerms, Reduction, add_up

Keep = Callable[[Tensor, Spec, Tensor], None]
"""Function that stores the terms of a parameter's gradient."""


class _State(threading.local):
    def __init__(self) -> None:
        self.keep: Keep | None = None
        self.waiting: dict[tuple[int, Spec], PendingTerms] = {}
        self.in_flight: list[Reduction] = []
        self.early: EarlyBuckets | None = None


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
        keep = _state.keep
        if keep is None or torch.is_grad_enabled() or _is_watched(ctx.leaf):
            return back(grad), None
        keep(ctx.leaf, back.src, grad)
        return None, None


is_backward(_Deferred.backward)
_deferred: Callable[[Tensor, Move], Tensor] = bare_apply(_Deferred)


def defer_reduction(x: Tensor, how: Move) -> Tensor:
    """Return `x`, a leaf, after `how`, which only makes it varying; the reduction of its gradient is deferred."""
    return _deferred(x, how)


def may_come_later(leaves: Sequence[Tensor]) -> bool:
    """True if the gradients of these parameters may be added after the backward pass that is running."""
    return _state.keep is not None and not torch.is_grad_enabled() and not any(map(_is_watched, leaves))


def add_later(leaves: Sequence[Tensor], sums: Callable[[], Sequence[Tensor]]) -> None:
    """Add the gradients that `sums` returns, after it has waited for them, to those of the parameters.

    Each reduction in flight holds the terms of its gradients. Call `finish_in_flight` first to limit that memory.
    """
    _state.in_flight.append(Reduction(leaves, sums))


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
        _state.waiting[id(leaf), spec] = PendingTerms(leaf, spec, grad.detach(), call_purpose.what[0])
    else:
        found.terms = found.take() + grad
        found.number = hash((found.number, call_purpose.what[0]))


def _keep_and_start(leaf: Tensor, spec: Spec, grad: Tensor) -> None:
    """Store terms, and start the reduction of a bucket that they fill, if they are on a device with streams."""
    found = _state.waiting.get((id(leaf), spec))
    is_other = found is not None and not isinstance(found, CountedTerms)
    if is_other or isinstance(grad, FakeTensor) or not platform_of(grad.device).has_streams:
        _keep(leaf, spec, grad)
        return
    if isinstance(found, CountedTerms):
        found.add(grad, call_purpose.what[0])
    else:
        found = CountedTerms(leaf, spec, grad.detach(), call_purpose.what[0])
        _state.waiting[id(leaf), spec] = found
    if _state.early is None:
        _state.early = EarlyBuckets()
    _state.early.note_terms(found)


@cache
def _keep_here() -> Keep:
    """Return the function that stores terms in this process; on the CPU it does nothing else."""
    return _keep_and_start if platform_of(device_types()[-1]).has_streams else _keep


class deferring:  # entered in every step: a class is faster than a generator
    """Context in which backward passes keep the terms of parameters' gradients until `flush`, if that is `wanted`.

    The passes stay in the calling thread, on an accelerator too, because the terms are kept per thread.
    """

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        self._before, _state.keep = _state.keep, _keep_here() if self._wanted else None
        self._threads = torch.autograd.set_multithreading_enabled(False)

    def __exit__(self, *error: object) -> None:
        self._threads.__exit__(*error)
        _state.keep = self._before


def forget(leaf: Tensor) -> None:
    """Drop the terms of `leaf`, whose gradient is replaced."""
    for reduction in _state.in_flight:
        reduction.forget(leaf)
    if not _state.waiting:
        return
    dropped = [_state.waiting.pop(key) for key in [k for k in _state.waiting if k[0] == id(leaf)]]
    if _state.early is not None:
        _state.early.forget(leaf, dropped)


def flush() -> None:
    """Reduce every pending gradient, in buckets of equal reductions, and add it to `.grad` in place."""
    finish_in_flight()
    if _state.waiting:
        waiting, _state.waiting = list(_state.waiting.values()), {}
        add_up(waiting if _state.early is None else _state.early.reduce(waiting))


def flush_read() -> None:
    """Reduce the pending gradients of parameters that already have a `.grad`.

    The program may hold that tensor.
    """
    _finish_read()
    with no_interception():
        read = {key: item for key, item in _state.waiting.items() if item.leaf.grad is not None}
    if read:
        _state.waiting = {key: item for key, item in _state.waiting.items() if key not in read}
        items = list(read.values())
        add_up(items if _state.early is None else _state.early.reduce(items))


def _finish_read() -> None:
    """Finish the reductions in flight of parameters that already have a `.grad`."""
    with no_interception():
        read = [r for r in _state.in_flight if any(leaf is not None and leaf.grad is not None for leaf in r.leaves)]
    for reduction in read:
        _state.in_flight.remove(reduction)
        reduction.finish()
