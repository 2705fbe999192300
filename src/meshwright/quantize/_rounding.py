"""Scales, rounding, and the way back: plain torch, on one device or on distributed tensors.

Shapes: n rows of a weight (output features), k columns (input features), g groups of columns. A scale is [n, g], with
g = 1 for one scale a row, and [1] for one scale in all. Every operator here works on elements or takes a maximum, so
distributed tensors get the very same numbers as one device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._scheme import NumberFormat

FLOAT8 = torch.float8_e4m3fn
FLOAT8_LARGEST = torch.finfo(FLOAT8).max
FLOAT8_SMALLEST = 2.0**-9
"""The smallest positive float8_e4m3fn, a subnormal number."""
EXPONENT_BITS = 0x7F800000
"""The bits of the exponent of a float32."""
SMALLEST_POWER = 2.0**-126
"""The smallest normal float32; a scale of mxfp4 is at least this."""
SMALLEST_SCALE = 2.0**-100
"""Lower bound of the largest nvfp4 scale of a tensor, so that its divisor is finite."""

NORMAL_FLOAT4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The numbers of nf4: quantiles of the normal distribution, scaled to [-1, 1] (Dettmers et al. 2023, QLoRA)."""
_NUMBERS = torch.tensor(NORMAL_FLOAT4, device="cpu")
_BOUNDS = (_NUMBERS[1:] + _NUMBERS[:-1]) / 2
"""The bounds between neighbours."""
_FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device="cpu")
"""The magnitudes of floats of 4 bits (e2m1)."""
FLOAT4_NUMBERS = torch.cat((_FLOAT4, -_FLOAT4))
"""The floats of 4 bits, by their bits."""
FLOAT4_LARGEST = 6.0
_FLOAT4_BOUNDS = (_FLOAT4[1:] + _FLOAT4[:-1]) / 2
_FLOAT4_BOUNDS[1::2] = torch.nextafter(_FLOAT4_BOUNDS[1::2], torch.zeros(1, device="cpu"))
"""The bounds between neighbours: a tie goes to the even code, so every other bound belongs to the upper one."""


def code_range(numbers: NumberFormat) -> tuple[int, int]:
    """Return the smallest and the largest integer code.

    >>> code_range(NumberFormat(4))
    (-8, 7)
    """
    half = 1 << (numbers.num_bits - 1)
    return -half, half - 1


def code_dtype(numbers: NumberFormat) -> torch.dtype:
    return FLOAT8 if numbers.type == "float" and numbers.num_bits == 8 else torch.int8


def scales_of(x: Tensor, numbers: NumberFormat, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the scales of `x` in `dtype` (that of `x` by default), and the zero points, or None if symmetric.

    Scales are computed in float32. Values that are all zero get the scale eps, so that nothing is divided by zero.
    Scales of floats of 4 bits stay in float32.
    """
    dtype = dtype or x.dtype
    values = _shared(x.float(), numbers)
    low, high = _bounds(values, numbers)
    if numbers.is_float4:
        largest = torch.maximum(high, -low)
        return float4_powers(largest) if numbers.strategy == "group" else float4_scales(values, largest), None
    if numbers.symmetric:
        scale, zero = torch.maximum(high, -low) / _half_range(numbers), None
    else:
        smallest, largest = code_range(numbers)
        scale = (high - low) / (largest - smallest)
        zero = (smallest - low / _not_zero(scale, dtype)).clamp(smallest, largest).round().to(torch.int8)
    return _not_zero(scale, dtype).to(dtype), zero


def scale_for(largest: Tensor, numbers: NumberFormat, dtype: torch.dtype) -> Tensor:
    """Return the scale, of shape [1], with which symmetric numbers reach the largest magnitude."""
    return _not_zero(largest.reshape(1).float() / _half_range(numbers), dtype).to(dtype)


def _half_range(numbers: NumberFormat) -> float:
    if numbers.type == "float":
        return FLOAT8_LARGEST
    return 1.0 if numbers.type == "nf" else ((1 << numbers.num_bits) - 1) / 2


def float4_powers(largest: Tensor) -> Tensor:
    """Return the scales of mxfp4 for groups [n, g] with these largest magnitudes.

    They are the powers of two with which at most 7, which is rounded to 6, is reached.
    """
    return (power_of_two(largest * (8 / 7)) / 4).clamp(min=SMALLEST_POWER)


def float4_scales(values: Tensor, largest: Tensor) -> Tensor:
    """Return the float32 scales of nvfp4 for groups [n, g, 16] with these largest magnitudes [n, g].

    They are float8 numbers over a power of two, `float4_divisor`, which depends on all groups. The largest magnitude of
    a group becomes 6 or 4, with the smaller squared error: there is no number between 4 and 6 (Cook et al. 2025, Four
    Over Six).
    """
    divisor = float4_divisor(largest / 4)
    to_six, to_four = (_as_float8(largest / top * divisor) / divisor for top in (FLOAT4_LARGEST, 4.0))
    is_six = _float4_errors(values, to_six) <= _float4_errors(values, to_four)
    return torch.where(is_six, to_six, to_four)


def _as_float8(scale: Tensor) -> Tensor:
    """Return the nearest positive float8 numbers, in float32."""
    found = scale.to(FLOAT8).float()
    return torch.where(found == 0, FLOAT8_SMALLEST, found)


def _float4_errors(values: Tensor, scale: Tensor) -> Tensor:
    """Return the squared rounding error of each group; halves are added, so the order does not depend on the layout."""
    ratio = values / scale.unsqueeze(-1)
    error = ((float4_values(float4_codes(ratio)) - ratio) * scale.unsqueeze(-1)).square()
    while error.shape[-1] > 1:
        half = error.shape[-1] // 2
        error = error[..., :half] + error[..., half:]
    return error.squeeze(-1)


def float4_divisor(scale: Tensor) -> Tensor:
    """Return the largest power of two, of shape [1], that multiplies nvfp4 scales to float8 numbers."""
    return power_of_two(FLOAT8_LARGEST / scale.amax().reshape(1).clamp(min=SMALLEST_SCALE))


def power_of_two(x: Tensor) -> Tensor:
    """Return the largest power of two that is at most x, for positive float32 numbers; exact on every device.

    >>> power_of_two(torch.tensor([3.9, 4.0]))
    tensor([2., 4.])
    """
    return (x.view(torch.int32) & EXPONENT_BITS).view(torch.float32)


def _not_zero(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(scale == 0, torch.finfo(dtype).eps, scale)


def _bounds(values: Tensor, numbers: NumberFormat) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value that share a scale; 0 is always between them."""
    if numbers.strategy == "tensor":
        low, high = values.amin().reshape(1), values.amax().reshape(1)
    else:
        keep = numbers.group_size is None
        low, high = values.amin(-1, keepdim=keep), values.amax(-1, keepdim=keep)
    return low.clamp(max=0), high.clamp(min=0)


def _shared(x: Tensor, numbers: NumberFormat) -> Tensor:
    """Return `x` with the columns of a group in a dim of their own: [n, k] -> [n, g, k / g]."""
    if numbers.group_size is None:
        return x
    return x.unflatten(-1, (x.shape[-1] // numbers.group_size, numbers.group_size))


def _beside(scale: Tensor, numbers: NumberFormat) -> Tensor:
    """Return a scale that broadcasts over the values that share it."""
    return scale if numbers.group_size is None else scale.unsqueeze(-1)


def to_codes(x: Tensor, scale: Tensor, zero: Tensor | None, numbers: NumberFormat) -> Tensor:
    """Return the codes of the numbers nearest to `x`; ties go to the even code."""
    ratio = _shared(x.float(), numbers) / _beside(scale.float(), numbers)
    if numbers.is_float4:
        found = float4_codes(ratio).to(torch.int8)
    elif numbers.type == "float":
        found = ratio.clamp(-FLOAT8_LARGEST, FLOAT8_LARGEST).to(FLOAT8)
    elif numbers.type == "nf":
        found = torch.bucketize(ratio, _BOUNDS.to(x.device)).to(torch.int8) - 8
    else:
        if zero is not None:
            ratio = ratio + _beside(zero.float(), numbers)
        found = ratio.round().clamp(*code_range(numbers)).to(torch.int8)
    return found if numbers.group_size is None else found.flatten(-2)


def float4_codes(ratio: Tensor) -> Tensor:
    """Return the codes -7 to 7 of the nearest floats of 4 bits: a magnitude's number, with a sign."""
    magnitude = torch.bucketize(ratio.abs(), _FLOAT4_BOUNDS.to(ratio.device))
    return torch.where(ratio < 0, -magnitude, magnitude)


def float4_values(codes: Tensor) -> Tensor:
    """Return the float32 numbers of the codes -7 to 7."""
    magnitude = _FLOAT4.to(codes.device)[codes.abs().long()]
    return torch.where(codes < 0, -magnitude, magnitude)


def to_values(
    codes: Tensor, scale: Tensor, zero: Tensor | None, numbers: NumberFormat, group_of: Tensor | None = None
) -> Tensor:
    """Return the numbers of the codes, in the dtype of the scale.

    `group_of` has the group of each column [k]; without it, groups are neighbours.
    """
    dtype = scale.dtype
    if numbers.type == "nf":
        table = _NUMBERS.to(codes.device, dtype)[:, None]
        values = F.embedding(codes.to(torch.int32) + 8, table).squeeze(-1)  # faster than indexing
    elif numbers.is_float4:
        values = float4_values(codes).to(dtype)
    else:
        values = codes.to(dtype)
    if group_of is not None:
        values = values if zero is None else values - zero.to(dtype).index_select(-1, group_of)
        return values * scale.index_select(-1, group_of)
    values = _shared(values, numbers)
    if zero is not None:
        values = values - _beside(zero.to(dtype), numbers)
    values = values * _beside(scale, numbers)
    return values if numbers.group_size is None else values.flatten(-2)


def relative_error(exact: Tensor, rounded: Tensor) -> float:
    """Return the norm of the difference over the norm of the exact numbers."""
    norm = float(exact.float().norm())
    return float((exact.float() - rounded.float()).norm()) / norm if norm else 0.0


def nearest(x: Tensor, numbers: NumberFormat) -> Tensor:
    """Return `x` rounded to the numbers of a format, with scales of its own; the dtype stays.

    >>> nearest(torch.tensor([[0.1, 1.0]]), NumberFormat(2))
    tensor([[0.0000, 0.6667]])
    """
    if x.numel() == 0:  # an expert without tokens has no largest value
        return x
    scale, zero = scales_of(x, numbers)
    return to_values(to_codes(x, scale, zero, numbers), scale, zero, numbers).to(x.dtype)
