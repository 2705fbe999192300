"""Training in low precision: layers that compute with few bits, while their parameters keep exact numbers.

fake_quantization   FakeQuantizedLinear, `prepare_qat`: training with the rounded numbers of a scheme
float8_products     products of two matrices that are rounded to float8 numbers
float8_linear       Float8Linear, `convert_to_float8_training`: such products in both passes of a linear layer
"""

from .fake_quantization import FakeQuantizedLinear, prepare_qat
from .float8_linear import Float8Linear, convert_to_float8_training

__all__ = ["FakeQuantizedLinear", "Float8Linear", "convert_to_float8_training", "prepare_qat"]
