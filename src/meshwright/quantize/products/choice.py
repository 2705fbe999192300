"""Which product of a quantized layer is the fastest for a number of rows, by measured times.

`python -m benchmarks quantize_products` measures them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.tensor import DistTensor, products_are_fast

from .._scheme import Scheme
from .._stored_weight import GROUP_OF, PACKED, SCALE, WEIGHT, ZERO

RUN = 8
"""Codes that the kernel decodes at once; groups have whole runs."""
ANY = 2**62
INPUTS = {torch.float32, torch.bfloat16, torch.float16}
"""The kernel computes in float32."""


class MostRows(NamedTuple):
    """The most rows of inputs for which a kernel of this package is faster than torch's products.

    `codes` and `half` are for packed codes with inputs in float32 and in half precision; `integers` is for int8 codes.
    """

    codes: int
    half: int
    integers: int


MOST_ROWS = {"AVX2": MostRows(64, ANY, 128), "AVX512": MostRows(16, 16, 4)}
"""By the vectors of the processor. Those of AVX-512 are low, because they were not measured."""


def most_rows() -> MostRows:
    return MOST_ROWS.get(torch.backends.cpu.get_cpu_capability(), MostRows(0, 0, 0))


def takes_codes(x: Tensor, stored: Mapping[str, Tensor | None], scheme: Scheme) -> bool:
    """True if the product with the codes of a stored weight is the fastest, and other bits than torch's are allowed."""
    if torch.compiler.is_compiling() or not products_are_fast():
        return False
    if torch.is_autocast_enabled("cpu") or (x.requires_grad and torch.is_grad_enabled()):
        return False
    most = most_rows().codes if x.dtype is torch.float32 else most_rows().half
    is_near = x.device.type == "cpu" and x.dtype in INPUTS and 0 < x.numel() <= most * x.shape[-1]
    return is_near and _has_form(stored, scheme) and _splits_alike(stored)


def _has_form(stored: Mapping[str, Tensor | None], scheme: Scheme) -> bool:
    """True if the kernel knows the codes; `model.half()` makes other numbers of float8."""
    size = scheme.weights.group_size
    codes = stored.get(WEIGHT)
    has_other_bytes = codes is not None and (ZERO in stored or codes.itemsize > 1)
    has_order = stored.get(GROUP_OF) is not None
    return not has_other_bytes and not has_order and (size is None or size % RUN == 0)


def _splits_alike(stored: Mapping[str, Tensor | None]) -> bool:
    """True if the codes and the scales of a row are on the same ranks, or one of them is whole."""
    codes, scale = stored.get(WEIGHT, stored.get(PACKED)), stored[SCALE]
    if not isinstance(codes, DistTensor) or not isinstance(scale, DistTensor) or scale.dim() == 1:
        return True
    columns = codes.spec.layout.dims[1]
    return not columns or scale.shape[1] == 1 or scale.spec.layout.dims[1] == columns
