"""Kinds of change: decorators, caches, functions in containers, methods, and user-defined gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, reduce, singledispatch, wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._stale_case import Case, Net, Run, attribute, calls, constant, item, kind, kind_on_mesh, reads

# --- decorators, caches, dispatch ------------------------------------------------------------------------------------


def scaled(function: Callable[..., float]) -> Any:
    """Return a function whose result is multiplied by a state of the decorator."""
    state = {"factor": 1.0}

    @wraps(function)
    def wrapper(*args: Any) -> float:
        return function(*args) * state["factor"]

    wrapper.state = state  # pyright: ignore[reportAttributeAccessIssue]
    return wrapper


@kind
def state_of_a_decorator(run: Run) -> Case:
    @scaled
    def read(self: Any) -> float:
        return 1.0

    return reads(run, read, item(read.state, "factor"))


class Decorated:
    """A decorator that is a class with state."""

    def __init__(self, function: Callable[[], float]) -> None:
        self.function, self.factor = function, 1.0

    def __call__(self) -> float:
        return self.function() * self.factor


@kind
def state_of_a_decorator_that_is_a_class(run: Run) -> Case:
    @Decorated
    def scale() -> float:
        return 1.0

    return reads(run, lambda self: scale(), attribute(scale, "factor"))


@kind
def wrapped_function_replaced(run: Run) -> Case:
    @Decorated
    def scale() -> float:
        return 1.0

    return reads(run, lambda self: scale(), lambda factor: setattr(scale, "function", constant(factor)))


@kind
def cache_cleared(run: Run) -> Case:
    settings = {"scale": 1.0}

    @lru_cache(maxsize=1)
    def scale() -> float:
        return settings["scale"]

    def change(factor: float) -> None:
        settings["scale"] = factor
        scale.cache_clear()

    return reads(run, lambda self: scale(), change)


@kind
def cache_refilled(run: Run) -> Case:
    settings = {"scale": 1.0}

    @lru_cache(maxsize=1)
    def scale(key: str) -> float:
        return settings[key]

    def change(factor: float) -> None:
        settings["scale"] = factor
        scale.cache_clear()
        scale("scale")
        settings["scale"] = 1.0

    return reads(run, lambda self: scale("scale"), change)


@kind
def function_registered_for_a_type(run: Run) -> Case:
    @singledispatch
    def scale(of: object) -> float:
        return 1.0

    return reads(run, lambda self: scale(1), lambda factor: scale.register(int, constant(factor)))


@kind_on_mesh
def function_in_a_dict_swapped(run: Run) -> Case:
    functions: dict[str, Any] = {"relu": F.relu}

    def change(factor: float) -> None:
        functions["relu"] = F.relu if factor == 1 else F.silu

    return calls(lambda self, x: self.functions["relu"](x), change, functions=functions)


@kind
def function_in_a_list_swapped(run: Run) -> Case:
    functions: list[Any] = [torch.tanh, torch.sigmoid]

    def change(factor: float) -> None:
        functions.reverse()

    return calls(lambda self, x: reduce(lambda y, f: f(y), self.functions[:1], x), change, functions=functions)


@kind
def function_that_is_an_attribute_swapped(run: Run) -> Case:
    def change(factor: float) -> None:
        case.model.activation = torch.tanh if factor == 1 else torch.sigmoid

    case = calls(lambda self, x: self.activation(x), change, activation=torch.tanh)
    return case


# --- methods ---------------------------------------------------------------------------------------------------------


@kind
def method_replaced_on_the_class(run: Run) -> Case:
    class Model(Net):
        pass

    return Case(Model(), lambda factor: setattr(Model, "scale", constant(factor)))


@kind_on_mesh
def method_replaced_on_the_instance(run: Run) -> Case:
    model = Net()
    return Case(model, lambda factor: setattr(model, "scale", MethodType(constant(factor), model)))


@kind
def static_method_replaced(run: Run) -> Case:
    class Model(Net):
        @staticmethod
        def factor() -> float:
            return 1.0

        def scale(self) -> float:
            return self.factor()

    return Case(Model(), lambda factor: setattr(Model, "factor", staticmethod(constant(factor))))


@kind
def forward_replaced_on_the_class(run: Run) -> Case:
    class Model(Net):
        pass

    def change(factor: float) -> None:
        Model.forward = lambda self, x: Net.forward(self, x) * factor

    return Case(Model(), change)


@kind_on_mesh
def forward_of_a_layer_replaced_on_the_instance(run: Run) -> Case:
    model = Net()
    forward = model.a.forward
    return Case(model, lambda factor: setattr(model.a, "forward", lambda x: forward(x) * factor))


@kind
def function_of_torch_replaced(run: Run) -> Case:
    tanh = torch.tanh
    run.set_attribute(torch, "tanh", tanh)
    return calls(lambda self, x: torch.tanh(x), lambda factor: setattr(torch, "tanh", lambda x: tanh(x) * factor))


@kind
def method_of_an_installed_class_replaced(run: Run) -> Case:
    forward = nn.Linear.forward
    run.set_attribute(nn.Linear, "forward", forward)
    return Case(Net(), lambda factor: setattr(nn.Linear, "forward", lambda self, x: forward(self, x) * factor))


# --- user-defined gradients ------------------------------------------------------------------------------------------


class Reversed(torch.autograd.Function):
    """A function whose backward multiplies the gradient by an attribute of the class."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * Reversed.factor


@kind
def class_attribute_that_a_backward_reads(run: Run) -> Case:
    run.set_attribute(Reversed, "factor", 1.0)
    return calls(lambda self, x: Reversed.apply(x), attribute(Reversed, "factor"))


@kind
def backward_replaced(run: Run) -> Case:
    class Local(Reversed):
        pass

    def change(factor: float) -> None:
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * factor

        Local.backward = staticmethod(backward)

    return calls(lambda self, x: Local.apply(x), change)


@kind
def attribute_that_a_backward_reads_by_its_context(run: Run) -> Case:
    settings = {"scale": 1.0}

    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.settings = settings
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * ctx.settings["scale"]

    return calls(lambda self, x: Local.apply(x), item(settings, "scale"))
