"""Users' autograd functions on distributed tensors: forward and backward pass see whole tensors.

Autograd runs on local tensors, so it would hand a function this rank's part of a gradient. What the function then gives
back has to lie as the dual of each argument, which it knows nothing of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.autograd import Function

from meshwright.layout import Spec

from ._dist_tensor import DistTensor
from ._errors import PlainInBackwardError
from ._handle_gradients import alias_of, as_dual_local, dual_stamp
from .torch_hooks import bare_apply, interception_on, tell_functions

_WHOLE: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""A user's function → the same one, whose backward pass sees whole gradients."""
_LIBRARIES = ("torch.", __name__.partition(".")[0] + ".")


def _applied(function: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`function.apply(*args, **kwargs)`."""
    given = interception_on() and any(isinstance(a, DistTensor) for a in args)
    if not given or f"{function.__module__}.".startswith(_LIBRARIES):
        return call(*args, **kwargs)
    if function not in _WHOLE:
        _WHOLE[function] = _on_whole(function)
    return bare_apply(_WHOLE[function])(*args, **kwargs)


def _on_whole(function: Any) -> Any:
    """The function, which notes how arguments and results lie, and takes and gives gradients of the whole tensors."""
    in_two = function.setup_context is not Function.setup_context
    name = "backward" if function.vjp is Function.vjp else "vjp"

    def forward(ctx: Any, *args: Any) -> Any:
        out = function.forward(ctx, *args)
        _note(ctx, args, out)
        return out

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        function.setup_context(ctx, inputs, output)
        _note(ctx, inputs, output)

    def backward(ctx: Any, *grads: Any) -> Any:
        ins, outs = ctx.meshwright
        found = getattr(function, name)(ctx, *[_whole(g, spec) for g, spec in zip(grads, outs, strict=True)])
        found = found if isinstance(found, tuple) else (found,)
        return tuple(_part(function, g, spec) for g, spec in zip(found, ins, strict=False))

    steps: dict[str, Any] = {"setup_context": setup_context} if in_two else {"forward": forward}
    methods = {key: staticmethod(step) for key, step in {**steps, name: backward}.items()}
    return type(function.__name__, (function,), {"__module__": function.__module__, **methods})


def _note(ctx: Any, args: Sequence[Any], out: Any) -> None:
    ctx.meshwright = _specs(args), _specs(out if isinstance(out, tuple) else (out,))


def _specs(values: Sequence[Any]) -> list[Spec | None]:
    return [x._spec if isinstance(x, DistTensor) else None for x in values]


def _whole(grad: Any, spec: Spec | None) -> Any:
    if spec is None or not isinstance(grad, Tensor) or isinstance(grad, DistTensor):
        return grad
    return dual_stamp(alias_of(grad), spec)


def _part(function: Any, grad: Any, spec: Spec | None) -> Any:
    """This rank's part of a gradient that a function gave."""
    if spec is None or not isinstance(grad, Tensor):
        return grad
    if not isinstance(grad, DistTensor):
        raise PlainInBackwardError(
            f"the backward pass of {function.__name__}", f"a plain gradient of an argument that lies as {spec!r}",
            "it may be this rank's part of a gradient, or a whole value: nothing tells which",
            "a gradient that is made of those it is given, or the function on local parts: mw.local_map",
        )  # fmt: skip
    return as_dual_local(grad, spec)


tell_functions(_applied)
