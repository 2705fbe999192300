"""Distributed tensors inside `vmap`, `grad`, `jvp` and the other transforms of `torch.func`: whole and plain.

A transform's tensors are torch's own wrappers, of which no part can be sent to another rank. So the inputs, and the
other tensors that a transformed function uses, are gathered outside of all transforms. Results are plain, and the same
on each rank. The writes of a function to an argument are written back when the transform ends.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from meshwright.layout import TorchValue

from .._errors import OperationError, TraceError
from .._torch_call import TorchFunction
from ..conversion.local_parts import whole_spec
from ..conversion.whole_call import WholeArgument, warn_ran_whole, whole_in_order
from ..core.dist_tensor import DistTensor, as_part, signature
from ..core.function_names import name_of
from ..core.handler_registry import DIRECT
from ..core.shared_elements import share_elements
from ..core.tree import map_tensors, tensors_in
from ..core.write_counts import version_of
from ..torch_hooks import (
    call_plain,
    graph_tracing,
    jit_tracing,
    no_interception,
    no_modes,
    offer_call,
    shares_storage,
    transforming,
    transforms_paused,
)
from ..views.dist_view import DistView, after_call, base_of, before_call
from .dispatch import planned
from .torch_hooks import intercept_scripts, intercept_transforms

NAME = "torch.func"
WHY = "its transforms see plain tensors"


def _observed(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return `func(*args, **kwargs)`, called inside a transform, a dispatch mode or a trace."""
    if func in DIRECT and transforming():
        return call_plain(func, types, args, kwargs or {})
    if func not in DIRECT:
        _check_traced(func, args, kwargs)
    if transforming():
        return _inside(func, args, kwargs or {})
    if func is Tensor.untyped_storage:  # this gathers the tensor, and a mode of fake tensors could not send it
        with no_modes():
            return planned(func, types, args, kwargs, signature(func, args, kwargs))
    return planned(func, types, args, kwargs, signature(func, args, kwargs))


def _inside(func: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return `func(*args, **kwargs)`, called inside a transform, on whole, plain tensors."""
    wholes = _Wholes((args, kwargs))
    args, kwargs = map_tensors(wholes.plain, (args, kwargs))
    out = func(*args, **kwargs)
    wholes.check(func)
    return out


def _check_traced(func: TorchFunction, args: TorchValue, kwargs: TorchValue) -> None:
    """Raise TraceError inside a trace, which would record the local part of one rank."""
    tracer = "torch.jit.trace" if jit_tracing() else "make_fx" if graph_tracing() else None
    if tracer is None:
        return
    specs = ", ".join(repr(t._spec) for t in tensors_in((args, kwargs or {})) if isinstance(t, DistTensor))
    raise TraceError(
        f"{name_of(func)} inside {tracer}",
        specs,
        "the trace would hold the local part and the local sizes of one rank",
        "trace the plain model and shard it afterwards, use torch.export.export, or use mw.to_static for a step; "
        "in place of torch.func.linearize, call torch.func.jvp",
    )


def _entering(x: TorchValue) -> TorchValue:
    """Return a tensor as the input of a transform."""
    if not isinstance(x, DistTensor):
        return x
    found = _argument(x)
    if found is None:
        call = _calls.open[-1] if _calls.open else _Call()
        found = call.add(x)
        warn_ran_whole(NAME, WHY)
    return found.whole


def _check_functional(x: object) -> None:
    """Raise OperationError for a distributed argument of `torch.func.functionalize`."""
    if isinstance(x, DistTensor):
        raise OperationError(
            f"{NAME}.functionalize of a distributed tensor",
            repr(x._spec),
            "functionalize writes into the memory of its arguments, and the argument is a gathered copy of the tensor",
            "call the function without functionalize; the results are the same",
        )


def _check_scripted(module: nn.Module) -> None:
    """Raise TraceError for a module with distributed parameters or buffers, before it becomes TorchScript."""
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(x, DistTensor):
            raise TraceError(
                f"torch.jit.script of {type(module).__name__}",
                f"{name}: {x._spec!r}",
                "TorchScript runs in C++, which sees the local part only",
                "call the module without torch.jit.script, or use torch.compile or mw.to_static",
            )


def _scripted(own: TorchFunction, args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Return the result of a TorchScript function on whole tensors; its C++ code would see local parts only."""
    script, *rest = args
    if not any(isinstance(t, DistTensor) for t in tensors_in((rest, kwargs))):
        return NotImplemented
    return DistTensor.__torch_function__(script, (DistTensor,), tuple(rest), kwargs)


class _Wholes:
    """Distributed tensors of a tree that a transformed function uses, with their whole values."""

    def __init__(self, tree: TorchValue) -> None:
        self.wholes: dict[int, Tensor] = {}
        self.gathered: list[tuple[DistTensor, Tensor, int]] = []
        with transforms_paused():
            for t in tensors_in(tree):
                if isinstance(t, DistTensor) and id(t) not in self.wholes:
                    self._add(t)
        if _calls.open:
            _calls.open[-1].used.extend(t for t, _, _ in self.gathered)
        warn_ran_whole(NAME, WHY)

    def _add(self, t: DistTensor) -> None:
        argument = _argument(t)
        if argument is not None:
            self.wholes[id(t)] = argument.whole
            return
        whole = self.wholes[id(t)] = _whole(t)
        self.gathered.append((t, whole, version_of(whole)))

    def plain(self, t: Tensor) -> Tensor:
        return self.wholes.get(id(t), t)

    def check(self, func: TorchFunction) -> None:
        """Raise OperationError if the call wrote to a tensor that has parts on other ranks."""
        for t, whole, version in self.gathered:
            if version_of(whole) != version and whole_spec(t._spec) is not t._spec:
                raise OperationError(
                    f"a write by {getattr(func, '__name__', func)} inside a transform of {NAME}",
                    repr(t._spec),
                    "inside a transform, the tensor is a whole copy, and a write to the copy is lost",
                    "pass the tensor as an argument of the transformed function, or write its result outside",
                )


def _whole(t: DistTensor) -> Tensor:
    """Return the whole value of `t` in its memory order; a copy unless each rank holds the whole."""
    t._read_again()
    return whole_in_order(t)


class _Call:
    """One call of a transformed function: its distributed arguments, and the other distributed tensors that it used."""

    def __init__(self) -> None:
        self.arguments: dict[int, WholeArgument] = {}
        self.views: list[tuple[DistView, list[int]]] = []
        self.used: list[DistTensor] = []

    def add(self, t: DistTensor) -> WholeArgument:
        with transforms_paused():
            if type(t) is DistView:
                self.views.append((t, before_call([t])))
            whole = _whole(t)
            with no_interception():
                self.arguments[id(t)] = WholeArgument(t, whole)
        return self.arguments[id(t)]

    def write_back(self) -> None:
        """Write to the arguments the values that the function wrote to their whole copies.

        Raises OperationError, before it writes anything, if another tensor of the call shares memory with an argument.
        """
        with no_interception():
            changed = [x for x in self.arguments.values() if x.has_memory and (x.is_differentiated() or x.is_written())]
            _check_alone([x.tensor for x in changed], [x.tensor for x in self.arguments.values()] + self.used)
        for x in changed:
            spec = whole_spec(x.tensor._spec)
            with nullcontext() if x.is_differentiated() else torch.no_grad():
                new = x.whole if x.is_differentiated() else x.whole.detach()
                x.tensor.copy_(as_part(new.view_as(new), spec.with_strides(new.stride())))
        for view, before in self.views:
            after_call([view], before, None)


class _Calls(threading.local):
    """The calls of transformed functions that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.open: list[_Call] = []


_calls = _Calls()


@contextmanager
def _in_call() -> Generator[None]:
    """Context around a transformed function; its writes to its arguments are written back at the end."""
    call = _Call()
    _calls.open.append(call)
    try:
        yield
    finally:
        _calls.open.pop()
    if call.arguments:
        with transforms_paused():
            call.write_back()


def _argument(t: DistTensor) -> WholeArgument | None:
    """Return the whole value of `t`, if `t` is an argument of a transformed function that runs."""
    return next((c.arguments[id(t)] for c in reversed(_calls.open) if id(t) in c.arguments), None)


def _may_share(a: DistTensor, b: DistTensor) -> bool:
    """True if a write to `a` may change `b`; a view with its own memory counts as all of its base."""
    if isinstance(a, DistView) or isinstance(b, DistView):
        return shares_storage(base_of(a), base_of(b))
    return share_elements(a, b)


def _check_alone(written: Sequence[DistTensor], others: Sequence[DistTensor]) -> None:
    for t in written:
        if any(_may_share(t, other) for other in others if other is not t):
            raise OperationError(
                f"a function inside a transform of {NAME} that writes to its argument",
                repr(t._spec),
                "another tensor of the call shares memory with the argument, and the transform copies each tensor",
                "pass one of the two tensors, and derive the other one inside the function",
            )


DistTensor._observed = staticmethod(_observed)
intercept_transforms(_entering, _check_functional, _in_call)
intercept_scripts(_check_scripted)
offer_call(torch.jit.ScriptFunction, "__call__", _scripted)
