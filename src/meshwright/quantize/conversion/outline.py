"""The outline of a quantized model: its layers, the layers that are left out, and bytes. No number is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from .._scheme import Scheme, scheme_of
from .._stored_weight import stored_dtypes, stored_shapes
from ..layers.linear_layers import check_module, computes_as_linear, is_linear, is_target, shared_weights
from .conv1d import conv1d_as_linear, is_conv1d
from .experts import Experts, numbers_of
from .selection import select


@dataclass(frozen=True, slots=True)
class Outline:
    """The layers that a scheme quantizes, and the bytes of a model before and after.

    `layers` has the bytes of the weight of each quantized layer, before and after, and those of quantized experts by
    the name of their parameter. `left_out` has the reason for each linear layer that stays, and for each other tensor
    with several matrices. `others` counts the bytes of all tensors that stay.
    """

    layers: dict[str, tuple[int, int]]
    left_out: dict[str, str]
    others: int

    @property
    def before(self) -> int:
        """Return the bytes of the model before its quantization."""
        return self.others + sum(before for before, _ in self.layers.values())

    @property
    def after(self) -> int:
        """Return the bytes of the quantized model."""
        return self.others + sum(after for _, after in self.layers.values())


def outline(model: nn.Module, scheme: Scheme | str = "int8") -> Outline:
    """Return the layers that a scheme quantizes, and the bytes before and after. The model may be on the meta device.

    `scheme` is a Scheme or the name of a preset.

    Raises:
        QuantizeError: the scheme does not exist, there is no layer, the model is quantized already,
            or the rows of a layer do not fit.

    >>> found = outline(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), "int8")
    >>> found.layers, found.before, found.after
    ({'0': (16384, 4368), '2': (2048, 560)}, 18720, 5216)
    """
    chosen = scheme_of(scheme)
    check_module(model)
    with conv1d_as_linear(model):
        selection = select(model, chosen)
        shared = shared_weights(model)
        left_out = {
            name: _reason(name, module, chosen, shared)
            for name, module in model.named_modules()
            if (is_linear(module) or is_conv1d(module)) and name not in selection.layers
        }
        sizes = {name: _sizes_of_layer(layer, chosen) for name, layer in selection.layers.items()}
        sizes |= {name: _sizes_of_experts(experts, chosen) for name, experts in selection.experts.items()}
        others = sum(map(_nbytes, _tensors(model))) - sum(before for before, _ in sizes.values())
        return Outline(sizes, left_out | selection.exact_experts, others)


def _reason(name: str, layer: nn.Module, scheme: Scheme, shared: set[int]) -> str:
    if is_conv1d(layer) or (is_target(name, layer, scheme) and id(layer.weight) in shared):
        return "another module uses its weight"
    if isinstance(layer, nn.Linear) and not computes_as_linear(layer):
        return "its class has a forward of its own"
    return "the scheme leaves it out"


def _sizes_of_layer(layer: nn.Linear, scheme: Scheme) -> tuple[int, int]:
    """Return the bytes of the weight of a layer, and of the tensors that hold it quantized."""
    shapes = stored_shapes(layer.out_features, layer.in_features, scheme)
    return _nbytes(layer.weight), _stored_bytes(shapes, scheme, layer.weight.dtype)


def _sizes_of_experts(experts: Experts, scheme: Scheme) -> tuple[int, int]:
    """Return the bytes of experts, and of the tensors that hold them quantized."""
    told = experts.told(numbers_of(scheme))
    return _nbytes(experts.parameter), _stored_bytes(told.stored_shapes(), told.scheme, told.dtype)


def _stored_bytes(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme, dtype: torch.dtype) -> int:
    dtypes = stored_dtypes(scheme, dtype)
    return sum(prod(shape) * dtypes[name].itemsize for name, shape in shapes.items())


def _tensors(model: nn.Module) -> Iterable[Tensor]:
    """Return each parameter and buffer of a model once."""
    return {id(x): x for x in (*model.parameters(), *model.buffers())}.values()


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
