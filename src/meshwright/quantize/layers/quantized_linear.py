"""The quantized linear layer: an ordinary module, whose buffers hold the weight and whose operators have rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._errors import QuantizeError
from .._rounding import nearest, scales_of, to_codes, to_values
from .._scheme import NumberFormat, Scheme
from .._stored_weight import INPUT_SCALE, PACKED, SCALE, WEIGHT, ZERO, is_packed, scale_in, values_in, zero_in
from ..products import integer_product, packed_product, takes_codes


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight, and with quantized inputs if the scheme says so.

    The buffers hold the weight in the stored form of the scheme. If it is packed, `weight` is `dequantized()`, because
    some models read the dtype of a layer's weight. `error` is the relative error of the layer's outputs on the
    calibration data, or that of its weight without such data; None if the layer was loaded. The gradient of the inputs
    ignores their rounding: `x - x.detach()` is zero and carries it (straight-through estimator, Bengio et al. 2013).
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        shape: tuple[int, int],
        scheme: Scheme,
        stored: Mapping[str, Tensor],
        bias: nn.Parameter | None = None,
        error: float | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.scheme = scheme
        self.error = error
        for name, tensor in stored.items():
            self.register_buffer(name, tensor)
        self.register_parameter("bias", bias)

    def __getattr__(self, name: str) -> Any:
        return self.dequantized() if name == WEIGHT and PACKED in self._buffers else super().__getattr__(name)

    def dequantized(self) -> Tensor:
        """Return the weight as numbers, in the dtype of the scales; float32 for floats of 4 bits."""
        return values_in(self._stored(), self.scheme, self.in_features)

    def _stored(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self._buffers.items() if tensor is not None}

    def forward(self, x: Tensor) -> Tensor:
        self._check_inputs(x)
        inputs = self.scheme.input_activations
        if inputs is None:
            return self._product(x)
        exact = x.detach()
        is_derived = x.requires_grad and torch.is_grad_enabled()
        if self._multiplies_integers(x):
            out = self._integer_product(exact, inputs)
            return out + F.linear(x - exact, self.dequantized().to(x.dtype)) if is_derived else out
        rounded = self._rounded(exact, inputs)
        return self._product(rounded + (x - exact) if is_derived else rounded)

    def _product(self, x: Tensor) -> Tensor:
        """Return the product with the weight, by its codes if that is faster, plus the bias."""
        if not takes_codes(x, self._buffers, self.scheme):
            return F.linear(x, self.dequantized().to(x.dtype), self.bias)
        stored, weights = self._stored(), self.scheme.weights
        codes, zero = stored[WEIGHT if WEIGHT in stored else PACKED], zero_in(stored, self.scheme, self.out_features)
        out = packed_product(x, codes, scale_in(stored, self.scheme), zero, weights.num_bits, weights.type)
        return out if self.bias is None else out + self.bias

    def _check_inputs(self, x: Tensor) -> None:
        """Raise QuantizeError for inputs that are codes."""
        if not x.is_floating_point() or x.itemsize == 1:
            raise QuantizeError(
                f"call {self!r}",
                f"inputs of {x.dtype}",
                "some models convert the inputs of a layer to the dtype of its weight, which has codes here",
                "pass floating-point inputs; if the model converts them, leave this layer out: ignore=(its name,)",
            )

    def _rounded(self, x: Tensor, inputs: NumberFormat) -> Tensor:
        """Return the inputs rounded to their numbers."""
        if inputs.dynamic:
            return nearest(x, inputs)
        scale = self.get_buffer(INPUT_SCALE).to(x.dtype)
        return to_values(to_codes(x, scale, None, inputs), scale, None, inputs)

    def _multiplies_integers(self, x: Tensor) -> bool:
        """True if codes can be multiplied as integers: one scale for each token and each row of the weight."""
        weights, inputs = self.scheme.weights, self.scheme.input_activations
        by_rows = not is_packed(self.scheme) and weights.type == "int" and weights.strategy == "channel"
        by_tokens = inputs is not None and inputs.type == "int" and inputs.strategy == "token" and inputs.symmetric
        return by_rows and by_tokens and ZERO not in self._buffers and x.device.type == "cpu" and x.dim() > 1

    def _integer_product(self, x: Tensor, inputs: NumberFormat) -> Tensor:
        """Return the product of the codes, which is exact, times both scales."""
        scale, _ = scales_of(x, inputs)
        codes = to_codes(x, scale, None, inputs)
        sums = integer_product(codes, self.get_buffer(WEIGHT))
        values = sums.float() * scale.float() * self.get_buffer(SCALE).float().t()
        out = values.to(x.dtype)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, {self.scheme!r}"
