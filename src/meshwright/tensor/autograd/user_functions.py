"""Users' autograd functions on distributed tensors: forward and backward pass see whole tensors.

Autograd runs on local tensors, so it would pass this rank's part of a gradient to a function. The function's result has
to be in the dual layout of each argument, which the function does not know.

The tensors that it saves pass through hooks on saved tensors as this rank's parts, like those that C++ saves. If those
hooks return a plain tensor, it is the part of the saved tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import cast
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.autograd import Function

from meshwright.layout import Spec, TorchValue

from .._errors import CollectiveError, PlainInBackwardError
from .._torch_call import TorchFunction
from ..conversion.convert import convert_local
from ..conversion.distribute import as_dist_tensor
from ..conversion.local_parts import spec_of, whole_local
from ..core.dist_tensor import DistTensor, local_reads, plain_view
from ..core.tree import tensors_in
from ..core.write_counts import version_of
from ..torch_hooks import (
    backward_running,
    bare_apply,
    interception,
    interception_on,
    is_dense,
    no_interception,
    offer_call,
)
from ..views.dist_view import DistView, after_function, before_function
from .dual_gradient import alias_of, as_dual_local, dual_stamp, keep_alive_with
from .torch_hooks import intercept_functions, savers

_WHOLE: WeakKeyDictionary[type[Function], type[Function]] = WeakKeyDictionary()
"""A user's function → the same function with a backward pass that sees whole gradients."""
_LIBRARIES = ("torch.", __name__.partition(".")[0] + ".")
_OPERATING = "torch.distributions."
"""Package of torch whose functions compute gradients by operators, as users' functions do."""
SEES_WHOLE = "sees_whole_tensors"
"""Attribute of a function of this library that sees whole tensors, as users' functions do, if it is True."""


class _Running(threading.local):
    """Numbers of the backward passes, as autograd's engine counts them, in which users' functions get whole tensors."""

    def __init__(self) -> None:
        self.passes: list[int] = []


_running = _Running()


def plain_may_be_part() -> bool:
    """True inside a backward pass, where a plain tensor may be this rank's part of a gradient.

    The backward pass of a user's function has no parts if the function was given and saved only distributed tensors.
    A plain tensor that such a backward pass makes is whole, as in a forward pass.
    """
    now = backward_running()
    return now != -1 and now not in _running.passes


@contextmanager
def _on_whole_tensors(ctx: TorchValue, grads: Sequence[TorchValue]) -> Generator[None]:
    """Note that a user's function runs in this backward pass, if it has no plain tensor; see `plain_may_be_part`."""
    with nullcontext() if _has_plain(ctx, grads) else plain_are_whole():
        yield


@contextmanager
def plain_are_whole() -> Generator[None]:
    """Declare that the plain tensors of the block are whole values, also inside a backward pass."""
    _running.passes.append(backward_running())
    try:
        yield
    finally:
        _running.passes.pop()


def _apply_to_distributed(
    function: type[Function],
    call: Callable[..., TorchValue],
    args: tuple[TorchValue, ...],
    kwargs: dict[str, TorchValue],
) -> TorchValue:
    """Return `function.apply(*args, **kwargs)`. Views are read again before it, as before every operator."""
    if not (interception_on() and any(isinstance(a, DistTensor) for a in args)):
        return call(*args, **kwargs)
    if function.__module__.startswith("torch.distributed."):
        raise CollectiveError(
            f"{function.__name__} of torch.distributed",
            f"a distributed tensor among {len(args)} arguments",
            "its backward pass would see gradients of this rank's part",
            "pass mw.unshard_dtensor(x) or x.to_local(); call mw.to_torch_dtensor(x) for a DTensor",
        )
    module = f"{function.__module__}."
    views = [a for a in args if type(a) is DistView]
    nodes = before_function(views)
    is_library = module.startswith(_LIBRARIES) and not module.startswith(_OPERATING)
    if is_library and not getattr(function, SEES_WHOLE, False):
        out = call(*args, **kwargs)
    else:
        if function not in _WHOLE:
            _WHOLE[function] = _with_whole_gradients(function)
        with no_interception():
            out = bare_apply(_WHOLE[function])(*args, **kwargs)
    after_function(views, nodes)
    return out


def _with_whole_gradients(function: type[Function]) -> type[Function]:
    """Return the function with gradients of the whole tensors in its backward pass.

    It records the layouts of arguments and results.
    """
    name = "backward" if function.vjp is Function.vjp else "vjp"

    def forward(ctx: TorchValue, *args: TorchValue) -> TorchValue:
        with interception():
            before = local_reads.count
            out = _aliased_results(partial(function.forward, ctx), args)
            _note_layouts(ctx, args, out, reads_parts=local_reads.count > before)
        return out

    def forward_alone(*args: TorchValue) -> TorchValue:
        with interception():
            return _aliased_results(function.forward, args)

    def setup_context(ctx: TorchValue, inputs: tuple[TorchValue, ...], output: TorchValue) -> None:
        with interception():
            before = local_reads.count
            function.setup_context(ctx, inputs, output)
            _note_layouts(ctx, inputs, output, reads_parts=local_reads.count > before)

    def backward(ctx: TorchValue, *grads: TorchValue) -> TorchValue:
        ins, outs = ctx.meshwright
        given = [_whole_gradient(g, spec) for g, spec in zip(grads, outs, strict=True)]
        before = local_reads.count
        with _on_whole_tensors(ctx, given):
            found = getattr(function, name)(ctx, *given)
        found = found if isinstance(found, tuple) else (found,)
        if not (ctx.meshwright_reads_parts or local_reads.count > before):
            found = tuple(_replicated_gradient(g, spec) for g, spec in zip(found, ins, strict=False))
        return tuple(_local_gradient(function, g, spec) for g, spec in zip(found, ins, strict=False))

    def jvp(ctx: TorchValue, *tangents: TorchValue) -> TorchValue:
        ins, outs = ctx.meshwright
        with interception():
            found = function.jvp(ctx, *[_whole_tangent(t, spec) for t, spec in zip(tangents, ins, strict=True)])
            several = isinstance(found, tuple)
            parts = [_local_tangent(t, spec) for t, spec in zip(found if several else (found,), outs, strict=True)]
        return tuple(parts) if several else parts[0]

    methods: dict[str, Callable[..., TorchValue]] = {"forward": forward, name: backward}
    if function.setup_context is not Function.setup_context:
        methods |= {"forward": forward_alone, "setup_context": setup_context}
    if function.jvp is not Function.jvp:
        methods["jvp"] = jvp
    members = {key: staticmethod(method) for key, method in methods.items()}
    return type(function.__name__, (function,), {"__module__": function.__module__, **members})


def _aliased_results(function: Callable[..., TorchValue], args: Sequence[TorchValue]) -> TorchValue:
    """Return the results of the function.

    torch would turn an argument among the results that was not written to into a plain tensor, so such a result is
    aliased.
    """
    before = [(x, version_of(x)) for x in args if isinstance(x, DistTensor)]
    out = function(*args)
    same = {id(x) for x, version in before if version_of(x) == version}

    def aliased(x: TorchValue) -> TorchValue:
        return as_dist_tensor(alias_of(x), x._spec) if id(x) in same else x

    return tuple(map(aliased, cast(tuple[TorchValue, ...], out))) if isinstance(out, tuple) else aliased(out)


def _note_layouts(ctx: TorchValue, args: Sequence[TorchValue], out: TorchValue, reads_parts: bool) -> None:
    """Store the layouts of arguments, results and saved tensors.

    A saved plain tensor is whole on every rank, unless it may come from `to_local` or from a backward pass around.
    """
    ctx.meshwright = _specs_of(args), _specs_of(out if isinstance(out, tuple) else (out,))
    saved: Sequence[TorchValue] = getattr(ctx, "to_save", None) or ()
    ctx.meshwright_reads_parts = reads_parts or plain_may_be_part()
    ctx.meshwright_saved = specs = _specs_saved(args, saved, ctx.meshwright_reads_parts)
    ctx.meshwright_saves_plain = any(isinstance(x, Tensor) and s is None for x, s in zip(saved, specs, strict=True))
    type(ctx).saved_tensors = property(_saved_tensors)


def _specs_saved(args: Sequence[TorchValue], saved: Sequence[TorchValue], reads_parts: bool) -> list[Spec | None]:
    """Return the specs of saved tensors; those of whole plain tensors are replicated."""
    if plain_may_be_part():
        return _specs_of(saved)
    like = next(x._spec for x in args if isinstance(x, DistTensor))
    whole = {id(x) for x in (args if reads_parts else saved) if isinstance(x, Tensor) and is_dense(x)}
    return [spec_of(x, like) if id(x) in whole else spec for x, spec in zip(saved, _specs_of(saved), strict=True)]


def _saved_tensors(ctx: TorchValue) -> tuple[TorchValue, ...]:
    """Return the saved tensors: distributed ones with the specs that they had, plain arguments as replicated ones."""
    base: TorchValue = super(type(ctx), ctx)
    found: tuple[TorchValue, ...] = base.saved_tensors
    return tuple(_as_saved(x, spec) for x, spec in zip(found, ctx.meshwright_saved, strict=True))


def _has_plain(ctx: TorchValue, grads: Sequence[TorchValue]) -> bool:
    """True if a plain tensor may be a part: a gradient, or a saved tensor that was no argument of the forward pass."""
    if not ctx.meshwright_reads_parts:
        return False
    held = {key: value for key, value in vars(ctx).items() if key != "to_save"}
    plain = any(not isinstance(x, DistTensor) for x in tensors_in((list(grads), held)))
    return plain or ctx.meshwright_saves_plain


def _as_saved(x: TorchValue, spec: Spec | None) -> TorchValue:
    return x if spec is None or isinstance(x, DistTensor) else as_dist_tensor(alias_of(x), spec)


def _specs_of(values: Sequence[TorchValue]) -> list[Spec | None]:
    return [x._spec if isinstance(x, DistTensor) else None for x in values]


def _whole_gradient(grad: TorchValue, spec: Spec | None) -> TorchValue:
    if spec is None or not isinstance(grad, Tensor) or isinstance(grad, DistTensor):
        return grad
    return dual_stamp(alias_of(grad), spec)


def _whole_tangent(tangent: TorchValue, spec: Spec | None) -> TorchValue:
    """Return the distributed tensor of which `tangent` is the local part."""
    if spec is None or not isinstance(tangent, Tensor) or isinstance(tangent, DistTensor):
        return tangent
    return as_dist_tensor(alias_of(tangent), spec.with_dtype(tangent.dtype))


def _local_tangent(tangent: TorchValue, spec: Spec | None) -> TorchValue:
    """Return this rank's part of a tangent that a user's function returned."""
    if spec is None or not isinstance(tangent, Tensor):
        return tangent
    have = spec_of(tangent, spec)
    local = convert_local(tangent, have, spec.with_dtype(have.dtype))
    with no_interception():
        return plain_view(local)


def _replicated_gradient(grad: TorchValue, spec: Spec | None) -> TorchValue:
    """Return a plain gradient, which every rank has whole, as the gradient of a distributed argument."""
    if spec is None or not isinstance(grad, Tensor) or isinstance(grad, DistTensor):
        return grad
    return as_dist_tensor(alias_of(grad), spec_of(grad, spec))


def _local_gradient(function: type[Function], grad: TorchValue, spec: Spec | None) -> TorchValue:
    """Return this rank's part of a gradient from a function; for a plain argument, the whole gradient."""
    if not isinstance(grad, Tensor) or (spec is None and not isinstance(grad, DistTensor)):
        return grad
    if spec is None:
        local = whole_local(grad)
        with no_interception():
            return keep_alive_with(grad, plain_view(local))
    if not isinstance(grad, DistTensor):
        raise PlainInBackwardError(
            f"the backward pass of {function.__name__}",
            f"a plain gradient of the argument {spec!r}",
            "the plain tensor may be this rank's part of a gradient or a whole value, and Meshwright cannot know",
            "compute the gradient from the gradients that backward receives, or wrap the function with mw.local_map",
        )
    return as_dual_local(grad, spec)


_APPLY_HANDLERS: list[Callable[..., TorchValue]] = [_apply_to_distributed]
"""Handlers of calls of autograd functions; the last one is used."""


@contextmanager
def functions_passed_to(apply: Callable[..., TorchValue]) -> Generator[None]:
    """Pass calls `F.apply(*args, **kwargs)` of autograd functions inside the block to `apply`.

    It is called as `apply(F, call, args, kwargs)`, where `call` does what the call would do outside the block. Below
    autograd, and before it, such a call shows only the operators of its forward pass. Exactly one rank of a simulation
    runs meanwhile.
    """
    outside = _APPLY_HANDLERS[-1]

    def handler(
        function: type[Function],
        call: Callable[..., TorchValue],
        args: tuple[TorchValue, ...],
        kwargs: dict[str, TorchValue],
    ) -> TorchValue:
        return apply(function, lambda *args, **kwargs: outside(function, call, args, kwargs), args, kwargs)

    _APPLY_HANDLERS.append(handler)
    try:
        yield
    finally:
        _APPLY_HANDLERS.pop()


def _pass_to_handler(*call: TorchValue) -> TorchValue:
    return _APPLY_HANDLERS[-1](*call)


def _refuse_unreported(function: type[Function]) -> None:
    """Raise PlainInBackwardError if a call that is not reported to the handlers would lose its gradient."""
    if len(_APPLY_HANDLERS) > 1:
        name = function.__name__
        raise PlainInBackwardError(
            f"{name}.apply in a program",
            f"a variable that got {name}.apply before the import of meshwright",
            "this release of torch does not report calls through such a variable, and their gradient would be lost",
            f"import meshwright before you assign {name}.apply to a variable, or call {name}.apply directly",
        )


def _read_before_saving(own: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Read a view again before `torch.utils.checkpoint` saves it as an input."""
    if args and isinstance(args[0], DistTensor):
        args[0]._read_again()
    return NotImplemented


intercept_functions(_pass_to_handler, _refuse_unreported)
for _owner, _name in savers():
    offer_call(_owner, _name, _read_before_saving)
