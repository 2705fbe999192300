"""The choice between a product with codes and one with numbers, by the number of rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.comm import installed_communicator
from meshwright.tensor import DistTensor, products_are_fast

from .._scheme import Scheme
from .._stored_weight import GROUP_OF, PACKED, SCALE, WEIGHT, ZERO
from .most_rows import built_in_rows, most_rows

RUN = 8
"""Codes that the kernel decodes at once; groups have whole runs."""
INPUTS = {torch.float32, torch.bfloat16, torch.float16}
"""The kernel computes in float32."""


def takes_codes(x: Tensor, stored: Mapping[str, Tensor | None], scheme: Scheme) -> bool:
    """True if the product with the codes of a stored weight is the fastest, and other bits than torch's are allowed.

    Ranks choose by the same table: they may have the same values.
    """
    if torch.compiler.is_compiling() or not products_are_fast():
        return False
    if torch.is_autocast_enabled("cpu") or (x.requires_grad and torch.is_grad_enabled()):
        return False
    table = most_rows() if installed_communicator() is None else built_in_rows()
    most = table.codes if x.dtype is torch.float32 else table.half
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
