"""The conversion of a model: which layers are quantized, and how they are replaced.

conv1d      layers of the class Conv1D of transformers as linear layers, while a model is quantized or loaded
experts     experts in one parameter: which of them a scheme quantizes, and their rounding
selection   the layers and experts of a model that a scheme quantizes
outline     layers, layers that are left out, and bytes, before any number is computed
quantize    `quantize`: all of it for a model
"""

from .conv1d import Conv1D, QuantizedConv1D, conv1d_as_linear, is_conv1d
from .experts import Experts, experts_in
from .outline import Outline, outline
from .quantize import quantize

__all__ = [
    "Conv1D",
    "Experts",
    "Outline",
    "QuantizedConv1D",
    "conv1d_as_linear",
    "experts_in",
    "is_conv1d",
    "outline",
    "quantize",
]
