"""Smoothing: move the scale of input features from the inputs into the weights, before weights are rounded.

Features are divided by factors s in the producer that makes them, and the columns of the weights are multiplied by s.
The product stays the same. The producer is a norm, or for AWQ a linear layer. AWQ (Lin et al. 2023) chooses factors for
which rounded weights have the smallest error of the outputs, SmoothQuant (Xiao et al. 2022) factors that make inputs
easier to round.

Shapes: n rows (output features), k columns (input features).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._rounding import nearest
from .._scheme import NumberFormat

EXPONENTS = 19
"""Number of exponents that AWQ tries, from 0 to 1; it tries weights without factors too."""
SMALLEST = 1e-4
"""Lower bound of factors; a feature that is always zero would have none."""


def powers_of_two(count: int, device: torch.device) -> Tensor:
    """Return factors with which every product is exact: a module computes the same numbers, or it cannot be scaled.

    >>> powers_of_two(4, torch.device("cpu"))
    tensor([0.2500, 1.0000, 4.0000, 0.2500])
    """
    return 4.0 ** (torch.arange(count, device=device) % 3 - 1)


def divided(x: Tensor, factors: Tensor) -> Tensor:
    """Return a parameter of a producer, divided: the weight or bias [k] of a norm, or the weight [k, j] of a layer."""
    return (x.float() / (factors if x.dim() == 1 else factors.unsqueeze(-1))).to(x.dtype)


def multiplied(weight: Tensor, factors: Tensor) -> Tensor:
    """Return a weight [n, k] with its columns multiplied by factors."""
    return (weight.float() * factors).to(weight.dtype)


def rounded(weight: Tensor, factors: Tensor, numbers: NumberFormat) -> Tensor:
    """Return the numbers that a weight [n, k] stands for after it is rounded under factors."""
    return (nearest(multiplied(weight, factors), numbers).float() / factors).to(weight.dtype)


def awq_factors(inputs: Tensor, weights: Sequence[Tensor], numbers: NumberFormat) -> list[Tensor]:
    """Return the factors x^a / w^(1 - a) of each exponent a, given the mean magnitudes x of the input features.

    w is the mean of weight magnitudes in a column, relative to the largest of those that share a scale. Only ratios
    count, so the geometric mean of the smallest and the largest factor is 1. The first factors are all 1.
    """
    means = _relative_means(weights, numbers)
    exponents = [i / (EXPONENTS - 1) for i in range(EXPONENTS)]
    found = [(inputs.pow(a) / (means.pow(1 - a) + SMALLEST)).clamp(min=SMALLEST) for a in exponents]
    return [torch.ones_like(inputs), *(factors / (factors.max() * factors.min()).sqrt() for factors in found)]


def _relative_means(weights: Sequence[Tensor], numbers: NumberFormat) -> Tensor:
    """Return the mean relative magnitude of the columns [k] of weights, over the rows of all of them."""
    total = torch.zeros(weights[0].shape[-1], dtype=torch.float64, device=weights[0].device)
    for weight in weights:
        shared = {"tensor": weight.numel(), "channel": weight.shape[-1]}.get(numbers.strategy, numbers.group_size)
        parts = weight.float().abs().reshape(-1, shared or weight.shape[-1])
        total += (parts / (parts.amax(-1, keepdim=True) + 1e-6)).view(weight.shape).sum(0, dtype=torch.float64)
    return (total / sum(len(weight) for weight in weights)).float()


def smoothquant_factors(weights: Sequence[Tensor], ranges: Tensor, strength: float) -> Tensor:
    """Return (max x - min x)^strength / (2 max |w|)^(1 - strength) for each feature, given the ranges max x - min x.

    The ranges of inputs are those of llm-compressor. For features that are symmetric about zero they are twice the
    largest magnitudes of the paper.
    """
    columns = 2 * torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
    factors = ranges.clamp(min=SMALLEST).pow(strength) / columns.clamp(min=SMALLEST).pow(1 - strength)
    return factors.clamp(min=SMALLEST)
