"""What a program writes over in place must lie in memory of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from meshwright.graph import Pass
from meshwright.passes import InPlace


def lie_apart(held: Iterable[Any]) -> bool:
    """False where two of the tensors overlap in memory."""
    tensors = {id(x): x for x in held if isinstance(x, Tensor)}.values()
    spans = sorted(_span(x) for x in tensors if x.numel() and x.untyped_storage().data_ptr())
    return all(one[1] <= following[0] for one, following in pairwise(spans))


def _span(x: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in memory, and the first behind it."""
    reach = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + reach * x.element_size()


def without_inputs(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """The passes for inputs that overlap: none of them is written over."""
    return tuple(replace(p, inputs=False) if isinstance(p, InPlace) else p for p in passes)
