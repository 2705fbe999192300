"""The layers of a model that a scheme quantizes, and their conversion into quantized ones."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import TypeGuard

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from .._errors import QuantizeError
from .._patterns import TARGETS, matches, refuse_unused
from .._scheme import Scheme
from .quantized_experts import QuantizedExperts
from .quantized_linear import QuantizedLinear

Layers = dict[str, nn.Linear]
"""Name → layer, in the order of the model."""


class RoundedLinear(nn.Linear):
    """A linear layer that trains an exact weight, and computes with rounded numbers."""


_CONTENTS = {"_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"}
"""The attributes of every module that hold its tensors and its modules; the others are its hooks and its mode."""


def check_module(model: object) -> None:
    """Raise QuantizeError if the model is no module."""
    if not isinstance(model, nn.Module):
        raise QuantizeError(
            f"quantize a {type(model).__name__}",
            "an object that is no module",
            "layers are found in a module, and changed there",
            "quantize the module, and then make the optimizer, or the static program, from it",
        )


def check_layers(layers: Layers, scheme: Scheme) -> None:
    """Raise QuantizeError if a layer was trained for other numbers than those of the scheme, or its weight has none."""
    for name, layer in layers.items():
        _check_trained_for(name, layer, scheme)
        if is_lazy(layer.weight) or not layer.in_features:
            raise _no_shape(name, layer)
        check_numbers(name, layer.weight)


def select_layers(model: nn.Module, scheme: Scheme, others: Mapping[str, nn.Module] | None = None) -> Layers:
    """Return the linear layers that the scheme quantizes; their weights may be on the meta device.

    A layer whose weight another module uses too, such as an output layer that is tied to the embedding, is left out,
    and so is a layer whose class has a `forward` of its own. `others` are modules that patterns may name too.

    Raises:
        QuantizeError: the model is quantized already, a pattern matches nothing, or the rows of a layer do not fit.
    """
    refuse_quantized(model)
    shared = shared_weights(model)
    linear = linear_layers(model)
    found = {
        name: layer
        for name, layer in linear.items()
        if id(layer.weight) not in shared and is_target(name, layer, scheme)
    }
    candidates = {**linear, **(others or {})}
    if candidates:
        asked = scheme.targets if linear else tuple(each for each in scheme.targets if each not in TARGETS)
        refuse_unused(model, candidates, asked, scheme.ignore)
    check_groups({name: (layer.out_features, layer.in_features) for name, layer in found.items()}, scheme)
    return found


def linear_layers(model: nn.Module) -> Layers:
    """Return the linear layers of a model that compute as `nn.Linear` does."""
    return {name: module for name, module in model.named_modules() if is_linear(module) and computes_as_linear(module)}


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """True for a linear layer that computes with its own weight; attention of torch reads its output layer's weight."""
    return isinstance(module, nn.Linear) and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)


def computes_as_linear(layer: nn.Linear) -> bool:
    """True unless the class of a layer has a `forward` of its own, which a quantized layer would not call."""
    return isinstance(layer, RoundedLinear) or type(layer).forward is nn.Linear.forward


def shared_weights(model: nn.Module) -> set[int]:
    """Return the ids of parameters that several modules use."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        own = {id(p) for p in module._parameters.values() if p is not None}
        shared |= own & seen
        seen |= own
    return shared


def is_target(name: str, module: nn.Module, scheme: Scheme) -> bool:
    return matches(name, module, scheme.targets) and not matches(name, module, scheme.ignore)


def quantized_module(model: nn.Module) -> str | None:
    """Return the name of the first module of a model that is quantized; None if there is none."""
    modules = model.named_modules()
    return next((name for name, module in modules if isinstance(module, (QuantizedLinear, QuantizedExperts))), None)


def refuse_quantized(model: nn.Module) -> None:
    """Raise QuantizeError if the model has quantized layers."""
    name = quantized_module(model)
    if name is not None:
        raise QuantizeError(
            f"quantize a {type(model).__name__}",
            f"{name or 'the model'} is quantized already",
            "rounding rounded numbers again adds an error that no calibration can see",
            "quantize the original model, or list other layers as targets in one scheme",
        )


def no_layer(model: nn.Module, targets: tuple[str, ...], ignore: tuple[str, ...]) -> QuantizeError:
    """Return the error for patterns that leave no linear layer."""
    asked = f"quantize the layers {list(targets)} without {list(ignore)}"
    transposed = [m for m in model.modules() if type(m).__name__ == "Conv1D" and not isinstance(m, nn.Linear)]
    if transposed:
        return QuantizeError(
            asked,
            f"a {type(model).__name__} with {len(transposed)} layers of the class Conv1D",
            "they are no nn.Linear: mw.quantize knows those of transformers, and layers that train with few bits none",
            "replace each of them with an nn.Linear that has the transposed weight, and call again",
        )
    names = list(linear_layers(model))
    return QuantizeError(
        asked,
        f"a {type(model).__name__} with " + (", ".join(names[:3]) or "no linear layer"),
        "no layer is left: others are ignored, rounded already, share their weight, or have a forward of their own",
        "write other patterns; meshwright.quantize.outline(model, scheme).left_out has the reason for each layer"
        if names
        else "pass a model with nn.Linear layers",
    )


def _check_trained_for(name: str, layer: nn.Linear, scheme: Scheme) -> None:
    """Raise QuantizeError if the layer was trained with the rounded numbers of another scheme."""
    trained = getattr(layer, "scheme", None)  # of a layer that `prepare_qat` prepared
    if not isinstance(trained, Scheme):
        return
    if (trained.weights, trained.input_activations) != (scheme.weights, scheme.input_activations):
        raise QuantizeError(
            f"quantize {name} by {scheme!r}",
            f"a layer that was trained for {trained!r}",
            "its weight was trained to be rounded to other numbers",
            "pass the scheme that mw.prepare_qat was given",
        )


def _no_shape(name: str, layer: nn.Linear) -> QuantizeError:
    return QuantizeError(
        f"quantize {name}",
        "a weight without a shape" if is_lazy(layer.weight) else "a weight with rows of 0 numbers",
        "a row of numbers has a scale",
        f"call the model once before, if its layers are lazy; or leave the layer out: ignore=({name!r},)",
    )


def check_numbers(name: str, weight: Tensor) -> None:
    """Raise QuantizeError if a weight has no finite floating-point numbers."""
    if weight.is_meta:
        raise QuantizeError(
            f"quantize {name}",
            "a weight on the meta device",
            "it has no numbers yet",
            "call mw.materialize(model) or load a checkpoint first",
        )
    if not weight.is_floating_point() or not bool(weight.isfinite().all()):
        found = f"a weight of {weight.dtype}" if not weight.is_floating_point() else "a weight with NaN or infinity"
        raise QuantizeError(
            f"quantize {name}",
            found,
            "scales are computed from finite floating-point numbers",
            f"repair the weight, or leave the layer out: ignore=({name!r},)",
        )


def check_groups(shapes: Mapping[str, tuple[int, int]], scheme: Scheme) -> None:
    """Raise QuantizeError if the rows of a weight, given by rows and columns, are no multiple of the group size."""
    size = scheme.weights.group_size
    if size is None:
        return
    odd = {name: shape for name, shape in shapes.items() if shape[1] % size}
    if odd:
        name, (rows, columns) = next(iter(odd.items()))
        fits = gcd(size, *(columns for _, columns in shapes.values()))
        raise QuantizeError(
            f"quantize {name} in groups of {size}",
            f"a weight of {rows} rows of {columns} numbers",
            f"{columns} is no multiple of {size}, so a group would have a part of the numbers",
            f"use group_size={fits}, which fits all layers, or leave out {len(odd)} layers: ignore=({name!r}, ...)",
        )


def call_layers(model: nn.Module) -> dict[nn.TransformerEncoderLayer, int]:
    """Make the encoder layers of torch call their linear layers, also in evaluation; return their earlier setting.

    In evaluation, such a layer passes the weights to one fused operator if its activation is a known one. The operator
    would compute with exact weights, or fail with codes.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    before = {layer: layer.activation_relu_or_gelu for layer in layers}
    for layer in layers:
        layer.activation_relu_or_gelu = 0
    return before


def change_class(layer: nn.Linear, new: type[RoundedLinear]) -> None:
    """Give a layer another class, in place.

    The class of a parametrized layer has properties that compute its parameters. They stay.
    """
    old = type(layer)
    layer.__class__ = type(old.__name__, (new,), dict(vars(old))) if is_parametrized(layer) else new


def convert_layers(model: nn.Module, new: Mapping[str, QuantizedLinear]) -> nn.Module:
    """Turn the layers into the new ones with the same names, and return the model.

    The modules stay the same objects with the same hooks. So all modules and hooks that know a layer know the new one.
    """
    for name, layer in new.items():
        module = model.get_submodule(name)
        stays = {key: vars(module)[key] for key in vars(nn.Module()).keys() - _CONTENTS}
        vars(module).clear()
        vars(module).update({**vars(layer), **stays})
        module.__class__ = type(layer)
    call_layers(model)
    return model
