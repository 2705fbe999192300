"""The quantized linear layer: an ordinary module, whose buffers hold the weight and whose operators have rules."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._rounding import nearest, scales_of, to_codes, to_values
from ._scheme import NumberFormat, Scheme
from ._stored_weight import INPUT_SCALE, SCALE, WEIGHT, ZERO, is_packed, values_in


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight, and with quantized inputs if the scheme says so.

    The buffers hold the weight in the stored form of the scheme. `error` is the relative error of the layer's outputs
    on the calibration data, or that of its weight without such data; None if the layer was loaded.
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

    def dequantized(self) -> Tensor:
        """Return the weight as numbers, in the dtype of the scales; float32 for floats of 4 bits."""
        stored = {name: tensor for name, tensor in self._buffers.items() if tensor is not None}
        return values_in(stored, self.scheme, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.scheme.input_activations
        if inputs is None:
            return F.linear(x, self.dequantized().to(x.dtype), self.bias)
        if self._multiplies_integers(x):
            return self._integer_product(x, inputs)
        return F.linear(self._rounded(x, inputs), self.dequantized().to(x.dtype), self.bias)

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
        product = torch.ops.aten._int_mm(codes.flatten(0, -2), self.get_buffer(WEIGHT).t())
        sums = product.unflatten(0, x.shape[:-1]) if x.dim() > 2 else product
        values = sums.float() * scale.float() * self.get_buffer(SCALE).float().t()
        out = values.to(x.dtype)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, {self.scheme!r}"
