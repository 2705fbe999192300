"""Smoothing: move the scale of input features from the inputs into the weights, before weights are rounded.

Features are divided by factors s in the norm that makes them, and the columns of the weights are multiplied by s. The
product stays the same. AWQ (Lin et al. 2023) chooses factors for which rounded weights have the smallest error of the
outputs, SmoothQuant (Xiao et al. 2022) factors that make inputs easier to round.

Shapes: n rows (output features), k columns (input features).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._rounding import nearest
from ._scheme import Scheme

GRID = 20
"""Number of exponents that AWQ tries, from 0 (no smoothing) to 0.95."""
SMALLEST = 1e-4
"""Lower bound of factors; a feature that is always zero would have none."""


def awq_factors(diagonal: Tensor, exponent: int) -> Tensor:
    """Return the factors of one exponent of the grid: the root mean square of each feature to the power of it.

    Only ratios count, so the geometric mean of the smallest and the largest factor is 1.
    """
    size = diagonal.sqrt().clamp(min=SMALLEST * float(diagonal.max().sqrt()) or 1.0)
    factors = size.pow(exponent / GRID)
    return factors / (factors.max() * factors.min()).sqrt()


def awq_loss(weights: Sequence[Tensor], hessian: Tensor, factors: Tensor, scheme: Scheme) -> float:
    """Return the squared error of the outputs if weights [n, k] are rounded under these factors."""
    total = 0.0
    for weight in weights:
        error = nearest(weight * factors.to(weight.dtype), scheme.weights).float() / factors - weight.float()
        total += float(((error @ hessian) * error).sum())
    return total


def smoothquant_factors(weights: Sequence[Tensor], largest: Tensor, strength: float) -> Tensor:
    """Return max |x|^strength / max |w|^(1 - strength) for each feature."""
    columns = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
    factors = largest.clamp(min=SMALLEST).pow(strength) / columns.clamp(min=SMALLEST).pow(1 - strength)
    return factors.clamp(min=SMALLEST)
