"""The conversion of a model: which layers are quantized, and how they are replaced.

conv1d      layers of the class Conv1D of transformers as linear layers, while a model is quantized or loaded
outline     layers, layers that are left out, and bytes, before any number is computed
quantize    `quantize`: all of it for a model
"""

from .conv1d import Conv1D, QuantizedConv1D, conv1d_as_linear, is_conv1d
from .outline import Outline, outline
from .quantize import quantize

__all__ = ["Conv1D", "Outline", "QuantizedConv1D", "conv1d_as_linear", "is_conv1d", "outline", "quantize"]
