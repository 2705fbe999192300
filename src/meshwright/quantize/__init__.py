"""Quantization: schemes, methods, quantized layers, and checkpoints of quantized models.

_scheme             NumberFormat, Scheme: which layers become which numbers, by which method; presets
_patterns           patterns that choose layers: names, classes, regular expressions
_rounding           scales, codes and values: plain torch, equal on one device and on every mesh
_packing            codes of few bits in int32 words
_stored_weight      the tensors that hold a quantized weight, their shapes and layouts
_errors             the errors of quantization
products            products of inputs with the codes of a weight, and the choice of a product by rows
layers              quantized layers and experts, and the linear layers that become such
calibration         observe the inputs of layers, and choose the numbers of their weights: GPTQ, AWQ, SmoothQuant
conversion          which layers of a model are quantized, also those of the class Conv1D; `outline` and `quantize`
checkpoints         save and load: safetensors files and config.json, in the forms of several libraries
training            layers that train with rounded numbers, and with products of float8 numbers
"""

from ._errors import CalibrationError, QuantizeError
from ._scheme import PRESETS, NumberFormat, Scheme
from .checkpoints.load import load_quantized
from .checkpoints.save import save_quantized
from .conversion.outline import Outline, outline
from .conversion.quantize import quantize
from .layers.quantized_experts import QuantizedExperts
from .layers.quantized_linear import QuantizedLinear
from .products import MostRows, keep_rows, measure_rows
from .training import FakeQuantizedLinear, Float8Linear, convert_to_float8_training, prepare_qat

__all__ = [
    "PRESETS",
    "CalibrationError",
    "FakeQuantizedLinear",
    "Float8Linear",
    "MostRows",
    "NumberFormat",
    "Outline",
    "QuantizeError",
    "QuantizedExperts",
    "QuantizedLinear",
    "Scheme",
    "convert_to_float8_training",
    "keep_rows",
    "load_quantized",
    "measure_rows",
    "outline",
    "prepare_qat",
    "quantize",
    "save_quantized",
]
