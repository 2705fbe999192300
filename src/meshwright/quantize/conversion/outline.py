"""The outline of a quantized model: its layers, the layers that are left out, and bytes. No number is computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

from .._layers import check_module, computes_as_linear, is_linear, is_target, select_layers, shared_weights
from .._scheme import Scheme, scheme_of
from .._stored_weight import stored_dtypes, stored_shapes
from .conv1d import conv1d_as_linear, is_conv1d


@dataclass(frozen=True, slots=True)
class Outline:
    """The layers that a scheme quantizes, and the bytes of a model before and after.

    `layers` has the bytes of the weight of each quantized layer, before and after. `left_out` has the reason for each
    linear layer that stays, and for each tensor that holds the weights of several experts. `others` counts the bytes of
    all tensors that stay.
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
        layers = select_layers(model, chosen)
        quantized = {id(layer.weight) for layer in layers.values()}
        shared = shared_weights(model)
        left_out = {
            name: _reason(name, module, chosen, shared)
            for name, module in model.named_modules()
            if (is_linear(module) or is_conv1d(module)) and name not in layers
        } | dict.fromkeys(_stacks(model), "a tensor with the weights of several layers")
        sizes = {name: (_nbytes(layer.weight), stored_bytes(layer, chosen)) for name, layer in layers.items()}
        return Outline(sizes, left_out, sum(_nbytes(x) for x in _tensors(model) if id(x) not in quantized))


def _stacks(model: nn.Module) -> Iterable[str]:
    """Return the names of parameters that hold a matrix for each expert."""
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
            own = module.named_parameters(name, recurse=False)
            yield from (key for key, x in own if x.dim() == 3 and min(x.shape) > 1)


def _reason(name: str, layer: nn.Module, scheme: Scheme, shared: set[int]) -> str:
    if is_conv1d(layer) or (is_target(name, layer, scheme) and id(layer.weight) in shared):
        return "another module uses its weight"
    if isinstance(layer, nn.Linear) and not computes_as_linear(layer):
        return "its class has a forward of its own"
    return "the scheme leaves it out"


def stored_bytes(layer: nn.Linear, scheme: Scheme) -> int:
    """Return the bytes of the tensors that hold the quantized weight of a layer."""
    dtypes = stored_dtypes(scheme, layer.weight.dtype)
    shapes = stored_shapes(layer.out_features, layer.in_features, scheme)
    return sum(prod(shape) * dtypes[name].itemsize for name, shape in shapes.items())


def _tensors(model: nn.Module) -> Iterable[Tensor]:
    """Return each parameter and buffer of a model once."""
    return {id(x): x for x in (*model.parameters(), *model.buffers())}.values()


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
