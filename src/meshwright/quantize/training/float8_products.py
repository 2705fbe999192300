"""Products of two matrices that are rounded to float8 numbers, with scales that are computed from them.

A scale maps the largest magnitude to the largest float8 number: of a whole matrix ("tensorwise"), or of each row of the
left and each column of the right matrix ("rowwise"). A maximum does not depend on the order, so distributed matrices
get the same codes as on one device; if the contracted dim is sharded, ranks take the maximum of their maxima.

Where the device has such products, `torch._scaled_mm` computes them. Elsewhere the codes are multiplied as float32
numbers, with the same scales.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from meshwright.layout import ROWWISE, platform_of

Recipe = Literal["tensorwise", "rowwise"]
FORWARD = torch.float8_e4m3fn
"""The dtype of weights and inputs."""
GRADIENT: dict[str, torch.dtype] = {"tensorwise": torch.float8_e5m2, "rowwise": torch.float8_e4m3fn}
"""Recipe → the dtype of gradients: with one scale for all, they need the wider range of e5m2."""
SMALLEST = 1e-12
"""Smallest magnitude that is mapped to the largest float8 number, so that no scale is zero."""
BLOCK = 16
"""Kernels take sizes that are multiples of this."""


def float8_product(a: Tensor, b: Tensor, recipe: Recipe, dtype_of_a: torch.dtype = FORWARD) -> Tensor:
    """Return `a @ b` [m, n] from the float8 numbers of a [m, k] and b [k, n], in the dtype of `a`."""
    if not a.numel() or not b.numel():
        return a @ b  # there are no numbers to round, and a maximum of none is an error
    codes_a, scale_a = to_float8(a, 1 if recipe == ROWWISE else None, dtype_of_a)
    codes_b, scale_b = to_float8(b, 0 if recipe == ROWWISE else None, FORWARD)
    if _has_kernel(codes_a, codes_b, recipe):
        return _product_by_kernel(codes_a, codes_b, scale_a, scale_b, a.dtype)
    return (codes_a.float() @ codes_b.float() * scale_a * scale_b).to(a.dtype)


def to_float8(x: Tensor, dim: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the float8 codes of `x`, and their float32 scale: one for each slice along `dim`, or one for all."""
    values, most = x.float(), torch.finfo(dtype).max
    largest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = largest.clamp(min=SMALLEST) / most
    return (values / scale).clamp(-most, most).to(dtype), scale


def _has_kernel(a: Tensor, b: Tensor, recipe: Recipe) -> bool:
    fits = a.shape[1] % BLOCK == 0 and b.shape[1] % BLOCK == 0
    return fits and _device_multiplies(a.device, recipe)


@torch.compiler.assume_constant_result
def _device_multiplies(device: torch.device, recipe: Recipe) -> bool:
    return recipe in platform_of(device).float8(device)


def _product_by_kernel(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product by `_scaled_mm`, which reads rows of `a` and columns of `b`.

    With scales for rows, its kernels give bfloat16 only. Other dtypes are scaled after a product in float32.
    """
    a, b = a.contiguous(), b.t().contiguous().t()
    if scale_a.dim() == 0 or dtype == torch.bfloat16:
        return torch.ops.aten._scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype)
    one = torch.ones((), device=a.device)
    return (torch.ops.aten._scaled_mm(a, b, one, one, out_dtype=torch.float32) * scale_a * scale_b).to(dtype)
