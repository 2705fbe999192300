"""Test for shared elements of memory between two local tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..torch_hooks import FakeTensor, shares_storage


def share_elements(a: Tensor, b: Tensor) -> bool:
    """True if the local tensors `a` and `b` have an element of memory in common; call it with interception off."""
    if a is b or not a.numel() or not b.numel() or not shares_storage(a, b):
        return False
    if isinstance(a, FakeTensor) or a.dtype != b.dtype:
        return True
    (low_a, high_a), (low_b, high_b) = _range(a), _range(b)
    if high_a < low_b or high_b < low_a:
        return False
    low, high = min(low_a, low_b), max(high_a, high_b)
    places = torch.arange(low, high + 1, device="cpu")
    return bool(torch.isin(_seen(places, a, low), _seen(places, b, low)).any())


def _range(x: Tensor) -> tuple[int, int]:
    """Return the first and the last place of `x` in its storage, in elements."""
    reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    start = int(x.storage_offset())
    return start, start + reach


def _seen(places: Tensor, x: Tensor, low: int) -> Tensor:
    return places.as_strided(x.shape, x.stride(), x.storage_offset() - low)
