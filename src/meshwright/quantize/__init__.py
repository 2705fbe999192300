"""Quantization: schemes, methods, quantized layers, and checkpoints of quantized models.

_scheme             NumberFormat, Scheme: which layers become which numbers, by which method; presets
_patterns           patterns that choose layers: names, classes, regular expressions
_rounding           scales, codes and values: plain torch, equal on one device and on every mesh
_packing            codes of few bits in int32 words
_stored_weight      the tensors that hold a quantized weight, their shapes and layouts
_quantized_linear   QuantizedLinear: the layer
_quantized_experts  QuantizedExperts: experts in one parameter, which computes its numbers when it is read
_layers             the layers that a scheme quantizes, and their conversion
_batches            calibration batches as calls of a model
_one_device         run a distributed model's code with whole weights and plain tensors
_ranks              work that ranks share: fixed trees of sums, owners, rows
_stages             the blocks of a model that are calibrated one by one
_observation        sums over the inputs of layers
_smoothing          AWQ and SmoothQuant: factors between a norm, or a layer, and the layers behind it
_awq                AWQ: the errors that choices of factors make
_gptq               GPTQ: factors, and the rounding of rows
_finished_stages    the folder of finished stages, from which an interrupted calibration goes on
_calibration        observe inputs, choose numbers, stage by stage
_errors             the errors of quantization
conversion          which layers of a model are quantized, also those of the class Conv1D; `outline` and `quantize`
products            products of inputs with the codes of a weight, and the choice of a product by rows
checkpoints         save and load: safetensors files and config.json, in the forms of several libraries
training            layers that train with rounded numbers, and with products of float8 numbers
"""

from ._errors import CalibrationError, QuantizeError
from ._quantized_experts import QuantizedExperts
from ._quantized_linear import QuantizedLinear
from ._scheme import PRESETS, NumberFormat, Scheme
from .checkpoints.load import load_quantized
from .checkpoints.save import save_quantized
from .conversion import Outline, outline, quantize
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
