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


class _State:
    """The gradients of one thread that are not reduced yet, and the function that stores more of them."""

    __slots__ = ("early", "in_flight", "keep", "waiting")

    def __init__(self) -> None:
        self.keep: Keep | None = None
        self.waiting: dict[tuple[int, Spec], PendingTerms] = {}
        self.in_flight: list[Reduction] = []
        self.early: EarlyBuckets | None = None


class _Thread(threading.local):
    """The gradients of the calling thread; each attribute of a `threading.local` takes 0.1 us, so there is only one."""

    def __init__(self) -> None:
        self.state = _State()


pending = _Thread()


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
        keep = pending.state.keep
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
    return pending.state.keep is not None and not torch.is_grad_enabled() and not any(map(_is_watched, leaves))


def add_later(leaves: Sequence[Tensor], sums: Callable[[], Sequence[Tensor]]) -> None:
    """Add the gradients that `sums` returns, after it has waited for them, to those of the parameters.

    Each reduction in flight holds the terms of its gradients. Call `finish_in_flight` first to limit that memory.
    """
    pending.state.in_flight.append(Reduction(leaves, sums))


def finish_in_flight() -> None:
    """Wait for the reductions in flight, and add their gradients."""
    in_flight = pending.state.in_flight
    while in_flight:
        in_flight.pop(0).finish()


def _is_watched(leaf: Tensor) -> bool:
    """True if hooks need the gradient as soon as it arrives."""
    with no_interception():
        return bool(leaf._backward_hooks) or bool(leaf._post_accumulate_grad_hooks)


def _keep(leaf: Tensor, spec: Spec, grad: Tensor) -> None:
    waiting = pending.state.waiting
    found = waiting.get((id(leaf), spec))
    if found is None:
        waiting[id(leaf), spec] = PendingTerms(leaf, spec, grad.detach(), call_purpose.what[0])
    else:
        found.terms = found.take() + grad
        found.number = hash((found.number, call_purpose.what[0]))


def _keep_and_start(leaf: Tensor, spec: Spec, grad: Tensor) -> None:
    """Store terms, and start the reduction of a bucket that they fill, if they are on a device with streams."""
    state = pending.state
    found = state.waiting.get((id(leaf), spec))
    is_other = found is not None and not isinstance(found, CountedTerms)
    if is_other or isinstance(grad, FakeTensor) or not platform_of(grad.device).has_streams:
        _keep(leaf, spec, grad)
        return
    if isinstance(found, CountedTerms):
        found.add(grad, call_purpose.what[0])
    else:
        found = CountedTerms(leaf, spec, grad.detach(), call_purpose.what[0])
        state.waiting[id(leaf), spec] = found
    if state.early is None:
        state.early = EarlyBuckets()
    state.early.note_terms(found)


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
        self._state = state = pending.state
        self._before, state.keep = state.keep, _keep_here() if self._wanted else None
        self._threads = torch.autograd.set_multithreading_enabled(False)

    def __exit__(self, *error: object) -> None:
        self._threads.__exit__(*error)
        self._state.keep = self._before


def forget(leaf: Tensor) -> None:
    """Drop the terms of `leaf`, whose gradient is replaced."""
    state = pending.state
    for reduction in state.in_flight:
        reduction.forget(leaf)
    waiting = state.waiting
    if not waiting:
        return
    dropped = [waiting.pop(key) for key in [k for k in waiting if k[0] == id(leaf)]]
    if state.early is not None:
        state.early.forget(leaf, dropped)


def flush() -> None:
    """Reduce every pending gradient, in buckets of equal reductions, and add it to `.grad` in place."""
    finish_in_flight()
    state = pending.state
    if state.waiting:
        waiting, state.waiting = list(state.waiting.values()), {}
        add_up(waiting if state.early is None else state.early.reduce(waiting))


def flush_read() -> None:
    """Reduce the pending gradients of parameters that already have a `.grad`.

    The program may hold that tensor.
    """
    state = pending.state
    if state.in_flight:
        _finish_read(state.in_flight)
    if not state.waiting:
        return
    with no_interception():
        read = {key: item for key, item in state.waiting.items() if item.leaf.grad is not None}
    if read:
        state.waiting = {key: item for key, item in state.waiting.items() if key not in read}
        items = list(read.values())
        add_up(items if state.early is None else state.early.reduce(items))


def _finish_read(in_flight: list[Reduction]) -> None:
    """Finish the reductions in flight of parameters that already have a `.grad`."""
    with no_interception():
        read = [r for r in in_flight if any(leaf is not None and leaf.grad is not None for leaf in r.leaves)]
    for reduction in read:
        in_flight.remove(reduction)
        reduction.finish()
