"""Quantization-aware training: layers compute with rounded numbers, and train the exact ones.

Rounding is plain torch, as in `mw.quantize`: a maximum for each scale, and elementwise operators. So no weight is
gathered, and the rounded numbers on a mesh equal those of one device.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .._errors import QuantizeError
from .._rounding import nearest
from .._scheme import NumberFormat, Scheme, scheme_of
from ..layers.linear_layers import RoundedLinear, call_layers, change_class, check_module, no_layer, select_layers


class FakeQuantizedLinear(RoundedLinear):
    """A linear layer that computes with its weight, and with its inputs if the scheme says so, as rounded numbers.

    The parameter keeps exact numbers. `mw.quantize` with the same scheme gives the codes of the rounded weight.
    """

    scheme: Scheme

    def forward(self, input: Tensor) -> Tensor:
        inputs = self.scheme.input_activations
        x = input if inputs is None else fake_quantized(input, inputs)
        return F.linear(x, fake_quantized(self.weight, self.scheme.weights), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.scheme!r}"


def fake_quantized(x: Tensor, numbers: NumberFormat) -> Tensor:
    """Return `x` rounded to the numbers of a format; the gradient is that of the exact numbers.

    The gradient ignores the rounding (straight-through estimator, Bengio et al. 2013). The difference that carries it
    is exactly zero, so the result has the bits of the rounded numbers.
    """
    exact = x.detach()
    return nearest(exact, numbers) + (x - exact)


def prepare_qat(model: nn.Module, scheme: Scheme | str = "int8") -> nn.Module:
    """Prepare a model for quantization-aware training: its linear layers compute with rounded numbers.

    The model is returned. Its modules and parameters stay the same objects, so marks, hooks and optimizers stay valid,
    and the call may come before or after them. Layers with a `forward` of their own stay as they are. Train the model,
    and pass it to `mw.quantize` with the same scheme.

    Raises:
        QuantizeError: the scheme does not exist, is calibrated, or does not fit a layer; or a layer trains with float8
            products. The model is unchanged.

    >>> prepare_qat(nn.Sequential(nn.Linear(8, 4)), "int8-dynamic")[0]
    FakeQuantizedLinear(in_features=8, out_features=4, bias=True, weights int8, channel; inputs int8, token, dynamic)
    """
    chosen = scheme_of(scheme)
    check_module(model)
    if chosen.is_calibrated:
        raise QuantizeError(
            f"quantization-aware training by {chosen!r}",
            "a scheme that needs calibration data",
            "numbers change in each step, so weights are rounded to the nearest numbers and inputs have dynamic scales",
            "use method='nearest' and dynamic inputs here; mw.quantize of the trained model may use another method",
        )
    layers = select_layers(model, chosen)
    if not layers:
        raise no_layer(model, chosen.targets, chosen.ignore)
    for name, layer in layers.items():
        _check_rounding(name, layer)
    for layer in layers.values():
        change_class(layer, FakeQuantizedLinear)
        vars(layer)["scheme"] = chosen
    call_layers(model)
    return model


def _check_rounding(name: str, layer: nn.Linear) -> None:
    """Raise QuantizeError if a layer computes with rounded numbers of another kind."""
    if isinstance(layer, RoundedLinear) and not isinstance(layer, FakeQuantizedLinear):
        raise QuantizeError(
            f"quantization-aware training of {name or 'a layer'}",
            f"{layer!r}",
            "a layer computes with rounded numbers of one kind",
            f"prepare the original model, or leave the layer out: Scheme(..., ignore=({name!r},))",
        )
