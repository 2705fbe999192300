"""Linear layers whose products, in the forward pass and of both gradients, are computed from float8 numbers."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import cast, get_args

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available
from torch.autograd.function import once_differentiable

from meshwright.fixed_order import in_same_numbers, same_numbers
from meshwright.layout import TorchValue

from .._errors import QuantizeError
from .._patterns import IGNORED, check_patterns, matches, refuse_unused
from ..layers.linear_layers import (
    RoundedLinear,
    call_layers,
    change_class,
    check_module,
    computes_as_linear,
    is_linear,
    no_layer,
)
from .float8_products import GRADIENT, Recipe, float8_product


class _Product(torch.autograd.Function):
    """The product `x @ weight.T` of float8 numbers, for rows x [m, k] and a weight [n, k].

    Both passes see whole tensors, also on a mesh.
    """

    sees_whole_tensors = True

    @staticmethod
    def forward(ctx: TorchValue, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        ctx.fixed_order = not torch.compiler.is_compiling() and in_same_numbers()  # torch.compile does not trace it
        return float8_product(x, weight.t(), recipe)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator has positional parameters
        ctx: TorchValue, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight = (each.detach() for each in ctx.saved_tensors)
        grad, recipe = grads[0].detach(), ctx.recipe
        of_x = of_weight = None
        with _order_of_forward_pass(ctx.fixed_order):
            if ctx.needs_input_grad[0]:
                of_x = float8_product(grad, weight, recipe, GRADIENT[recipe])
            if ctx.needs_input_grad[1]:
                of_weight = float8_product(grad.t(), x, recipe, GRADIENT[recipe])
        return of_x, of_weight, None


@contextmanager
def _order_of_forward_pass(fixed: bool) -> Generator[None]:
    """Run the block of a backward pass with sums in a fixed order, if the forward pass ran inside `mw.same_numbers()`.

    torch leaves that block in a backward pass, and the block leaves out calls that cannot be derived.
    """
    with same_numbers() if fixed else nullcontext(), torch.enable_grad() if fixed else nullcontext():
        yield


class Float8Linear(RoundedLinear):
    """A linear layer that multiplies float8 numbers; its parameters and results keep their dtype."""

    recipe: Recipe

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        is_autocast = is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if is_autocast else input.dtype
        rows = input.flatten(0, -2) if input.dim() > 1 else input.unsqueeze(0)
        with torch.autocast(kind, enabled=False) if is_autocast else nullcontext():
            product = _Product.apply(rows.to(dtype), self.weight.to(dtype), self.recipe)
            bias = cast("Tensor | None", self.bias)
            out = product if bias is None else product + bias.to(dtype)
        return out.unflatten(0, input.shape[:-1]) if input.dim() > 1 else out.squeeze(0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, float8 {self.recipe}"


def convert_to_float8_training(
    model: nn.Module,
    recipe: Recipe = "tensorwise",
    *,
    targets: tuple[str, ...] = ("Linear",),
    ignore: tuple[str, ...] = IGNORED,
) -> nn.Module:
    """Turn the linear layers of a model into layers that train with float8 products, and return the model.

    With "tensorwise", a matrix has one scale, and gradients are float8_e5m2. With "rowwise", each row and each column
    has a scale, and all numbers are float8_e4m3fn: more exact, and slower. Patterns are those of `Scheme`. Modules and
    parameters stay the same objects, so marks, hooks and optimizers stay valid, and the call may come before or after
    them. Layers with a `forward` of their own, and those of `prepare_qat`, stay as they are.

    Raises:
        QuantizeError: there is no such recipe, or no such layer. The model is unchanged.

    >>> convert_to_float8_training(nn.Sequential(nn.Linear(8, 4)), "rowwise")[0]
    Float8Linear(in_features=8, out_features=4, bias=True, float8 rowwise)
    """
    check_module(model)
    if recipe not in get_args(Recipe):
        raise QuantizeError(
            f"float8 training by {recipe!r}",
            repr(recipe),
            "a recipe says which numbers share a scale",
            'write "tensorwise" or "rowwise"',
        )
    check_patterns("targets", targets)
    check_patterns("ignore", ignore)
    linear = {name: module for name, module in model.named_modules() if is_linear(module) and _may_change(module)}
    layers = [x for name, x in linear.items() if matches(name, x, targets) and not matches(name, x, ignore)]
    if linear:
        refuse_unused(model, linear, targets, ignore)
    if not layers:
        raise no_layer(model, targets, ignore)
    for layer in layers:
        change_class(layer, Float8Linear)
        vars(layer)["recipe"] = recipe
    call_layers(model)
    return model


def _may_change(layer: nn.Linear) -> bool:
    """True for a layer that computes with exact numbers, or with those of another recipe."""
    return isinstance(layer, Float8Linear) or (computes_as_linear(layer) and not isinstance(layer, RoundedLinear))
