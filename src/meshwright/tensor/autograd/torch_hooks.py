"""The private torch names that autograd's handlers need: functions of users, dual tensors and backward passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import local
from types import FunctionType, MethodType

import torch
from torch.autograd.graph import _engine_run_backward
from torch.utils import checkpoint

from meshwright.layout import TorchValue

from .._torch_call import Arguments, TorchFunction
from ..torch_hooks import view_replay


class _InterceptedApply:
    @classmethod
    def apply(cls, *args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        told: TorchValue = __class__  # the class of the function with this code: torch.autograd.Function
        return told.meshwright_told(cls, args, kwargs)


def intercept_functions(apply: TorchFunction, untold: Callable[[type[torch.autograd.Function]], None]) -> None:
    """Replace `F.apply(*args, **kwargs)` of autograd functions by `apply(F, its own apply, args, kwargs)`, from now on.

    This is the only hook that shows which operators belong to a function with its own backward pass. torch passes local
    gradients to that function without calling `__torch_function__`. If torch has `apply` in Python, its code object is
    exchanged, so that earlier names (`swish = Swish.apply`) are covered too. If it is in C, calls by such a name run
    `untold(F)`.
    """
    function: TorchValue = torch.autograd.Function
    member = function.__dict__["apply"]
    python: TorchValue = getattr(member, "__func__", None)
    if python is None:  # torch 2.15 has it in C
        own = partial(_apply_reported, member)
        function.apply = classmethod(_by_name)
        for early in _subclasses_with_forward(function):
            early.forward = _forward_of(early, early.forward, untold)
    else:
        kept = python.__code__, python.__globals__, python.__name__, python.__defaults__, python.__closure__
        own = partial(MethodType, FunctionType(*kept))
        told = _InterceptedApply.__dict__["apply"].__func__.__code__
        python.__code__ = told.replace(co_filename=python.__code__.co_filename)  # by which torch.compile knows it
    function.meshwright_told = staticmethod(lambda cls, args, kwargs: apply(cls, own(cls), args, kwargs))


def _by_name(cls: type[torch.autograd.Function], *args: TorchValue, **kwargs: TorchValue) -> TorchValue:
    told: TorchValue = torch.autograd.Function
    return told.meshwright_told(cls, args, kwargs)


_by_name.__name__ = "apply"  # by which torch.compile knows it
_reporting = local()


def _apply_reported(member: TorchValue, function: type[torch.autograd.Function]) -> TorchFunction:
    """Return `F.apply` with a flag for the forward function that the call was reported."""

    def call(*args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        before = getattr(_reporting, "on", False)
        _reporting.on = True
        try:
            return member.__get__(None, function)(*args, **kwargs)
        finally:
            _reporting.on = before

    return call


def _forward_of(
    function: type[torch.autograd.Function],
    own: TorchFunction,
    untold: Callable[[type[torch.autograd.Function]], None],
) -> staticmethod[..., TorchValue]:
    """Return the forward function of a class, which calls `untold` if the call was not reported."""

    def forward(*args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        if not torch.compiler.is_compiling() and not getattr(_reporting, "on", False):
            untold(function)
        return own(*args, **kwargs)

    return staticmethod(forward)


def _subclasses_with_forward(function: type[torch.autograd.Function]) -> list[TorchValue]:
    """Return the subclasses that define a forward function."""
    below = [c for sub in function.__subclasses__() for c in (sub, *_subclasses_with_forward(sub))]
    return [c for c in dict.fromkeys(below) if "forward" in vars(c)]


MAKE_DUAL: TorchFunction = getattr(torch, "_make_dual")  # noqa: B009 - not in torch's stubs
"""The C++ part of `forward_ad.make_dual`."""

UNPACK_DUAL: TorchFunction = getattr(torch, "_unpack_dual")  # noqa: B009 - not in torch's stubs
"""The C++ part of `forward_ad.unpack_dual`."""


def savers() -> list[tuple[object, str]]:
    """Return (owner, name) of the C++ functions that save a tensor for a backward pass outside of a Function."""
    name = "_make_saved_tensor"
    return [(checkpoint, name)] if hasattr(checkpoint, name) else []


def node_finders() -> list[tuple[object, str]]:
    """Return (owner, name) of the function by which torch finds the autograd nodes of tensors, to compare them."""
    name = "_get_grad_fn_or_grad_acc"
    return [(torch.autograd.graph, name)] if hasattr(torch.autograd.graph, name) else []


def run_backward(
    outputs: list[torch.Tensor],
    seeds: list[TorchValue],
    keep: bool,
    create: bool,
    inputs: Arguments,
    **how: TorchValue,
) -> Arguments:
    """Run the autograd engine itself.

    Public functions would call `__torch_function__` of distributed `inputs` first.
    """
    try:
        with view_replay() if create else nullcontext():
            return _engine_run_backward(tuple(outputs), tuple(seeds), keep, create, inputs, **how)
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            error.add_note("the shape above is that of this rank's part of a distributed tensor")
        raise


def intercept_backward(context: Callable[[], AbstractContextManager[None]]) -> None:
    """Run every backward pass of plain tensors inside `context()`, from now on.

    It calls no distributed tensor otherwise.
    """
    own = vars(torch.autograd)["_engine_run_backward"]

    def run(*args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        with context():
            return own(*args, **kwargs)

    torch.autograd.__dict__.update(_engine_run_backward=run)
