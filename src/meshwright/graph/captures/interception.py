"""Interception of events that operators do not show: users' autograd functions, tensor hooks, uses of gradients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import getclosurevars
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from meshwright.layout import TorchValue, user_frame
from meshwright.tensor import Opaque, functions_passed_to, tensors_in

from .._errors import CaptureError, capture_error
from ..guards import check_not_kept
from ..torch_hooks import FakeTensor, backward_hooks_of_all


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A user's `torch.autograd.Function` as an operator; it keeps the user's backward pass."""

    function: type[torch.autograd.Function]

    def __call__(self, args: tuple[TorchValue, ...], kwargs: dict[str, TorchValue]) -> TorchValue:
        return self.function.apply(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{self.function.__name__}.apply"


@dataclass(frozen=True, slots=True)
class Hook:
    """`x.register_hook(fn)` on a tensor of the forward pass, as an operator without result."""

    fn: Callable[[Tensor], Tensor | None]

    def __call__(self, x: Tensor) -> None:
        x.register_hook(self._called)

    def _called(self, grad: Tensor) -> Tensor | None:
        """Return what the hook returns. Raise CaptureError if it fails and uses tensors of the forward pass."""
        try:
            return self.fn(grad)
        except Exception as error:  # torch has many errors for tensors of two captures
            shapes = [tuple(x.shape) for x in _captured_tensors(self.fn)]
            if not shapes:
                raise
            raise CaptureError(
                f"recording the hook {getattr(self.fn, '__qualname__', self.fn)}",
                f"tensors of the forward pass that the hook uses, of shapes {', '.join(map(str, shapes))}",
                "a hook of a program gets the gradient alone, and the forward pass that it saw is recorded already",
                "write a torch.autograd.Function, and pass it the tensors by ctx.save_for_backward; or, without a "
                "pipeline, pass Strategy(full_graph=False), which runs code that cannot be captured in Python",
            ) from error

    def __repr__(self) -> str:
        return f"hook {getattr(self.fn, '__name__', self.fn)}"


def _captured_tensors(fn: Callable[..., object]) -> list[Tensor]:
    """Return the tensors of a capture among the variables that a function uses from outside."""
    if not isinstance(fn, FunctionType):
        return []
    used = getclosurevars(fn).nonlocals.values()
    return [x for x in tensors_in(tuple(used)) if isinstance(x, FakeTensor)]


@contextmanager
def intercepted(note: Opaque) -> Generator[None]:
    """Report calls of autograd functions and tensor hooks to `note` inside the context.

    Raises CaptureError for uses of `.grad` and `backward()`, and for a function that returns one of its arguments.
    """

    def apply(
        function: type[torch.autograd.Function],
        call: Callable[..., TorchValue],
        args: tuple[TorchValue, ...],
        kwargs: dict[str, TorchValue],
    ) -> TorchValue:
        if function is CheckpointFunction:  # passes decide about recomputation
            run, _, *rest = args
            return run(*rest)
        out = note(UserFunction(function), (args, kwargs), lambda: call(*args, **kwargs))
        _check_fresh(function, args, out)
        return out

    with functions_passed_to(apply), _Calls(note):
        yield


class _Calls(TorchFunctionMode):
    """Mode that intercepts methods and attributes of tensors."""

    def __init__(self, note: Opaque) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(
        self, func: Callable[..., TorchValue], types: TorchValue, args: TorchValue = (), kwargs: TorchValue = None
    ) -> TorchValue:
        kwargs = kwargs or {}
        check_not_kept(args, func)
        if func is Tensor.register_hook:
            x, fn = (*args, *kwargs.values())
            handle: RemovableHandle = func(x, fn)  # refuses what torch refuses
            handle.remove()
            self.note(Hook(fn), (x,), lambda: None)
            return RemovableHandle(OrderedDict[int, Any]())
        if func in _SWITCHES and isinstance(args[0], nn.Parameter) and not isinstance(args[0], FakeTensor):
            raise capture_error(
                "requires_grad_() of a parameter that Python holds beside the model's modules",
                "the modules hold other tensors during the capture, so the call would have no effect",
                "read the parameter from its module: for p in self.layer.parameters(): p.requires_grad_(False)",
            )
        if func in _REFUSED:
            raise capture_error(
                f"a use of {_REFUSED[func]}",
                "a captured forward pass runs once, before any gradient exists",
                "use torch.autograd.grad for gradients inside the loss; the step itself runs the backward pass",
            )
        return func(*args, **kwargs)


_GRAD: TorchValue = Tensor.grad
_REQUIRES_GRAD: TorchValue = Tensor.requires_grad
_SWITCHES = (Tensor.requires_grad_, _REQUIRES_GRAD.__set__)
"""Functions that change whether a tensor requires a gradient."""
_REFUSED: dict[Callable[..., TorchValue], str] = {
    Tensor.backward: "backward()",
    Tensor.retain_grad: "retain_grad()",
    Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook()",
    _GRAD.__get__: ".grad",
    _GRAD.__set__: ".grad",
}


def _check_fresh(function: type[torch.autograd.Function], args: tuple[TorchValue, ...], out: TorchValue) -> None:
    if any(r is a for r in tensors_in(out) for a in tensors_in(args)):
        raise CaptureError(
            f"capturing {user_frame()}",
            f"{function.__name__}.apply, which writes to its argument",
            "programs have no writes, and the effect of the function on other views of the memory is unknown",
            "return a new tensor from the function",
        )


def check_hooks(module: nn.Module) -> None:
    """Raise CaptureError for hooks that a program would not call."""
    if any(backward_hooks_of_all()):
        raise CaptureError(
            f"capturing {type(module).__name__}",
            "a backward hook of all layers",
            "a program has gradients of tensors, not of layers",
            "call x.register_hook(fn) on the layer's input or output in its forward pass",
        )
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise CaptureError(
                f"capturing {type(module).__name__}",
                f"a backward hook of the layer {name or type(part).__name__}",
                "a program has gradients of tensors, not of layers",
                "call x.register_hook(fn) on the layer's input or output in its forward pass",
            )
        for key, value in part._parameters.items():
            if value is not None and getattr(value, "_post_accumulate_grad_hooks", None):
                raise CaptureError(
                    f"capturing {type(module).__name__}",
                    f"a hook that {name}.{key} calls when its gradient is accumulated",
                    "a program passes gradients to the optimizer, and parameters do not accumulate them",
                    "use parameter.register_hook(fn), or optimizer.register_step_pre_hook(fn)",
                )
