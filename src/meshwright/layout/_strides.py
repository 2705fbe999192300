"""Strides of whole tensors, with torch's definitions of contiguous and dense.

A tensor is *contiguous* if its elements follow each other in row-major order. A tensor is *dense* if its elements fill
a block of memory in the order of some permutation of its dims. Dims of size 1 have no influence on either property.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from ._size import hint

Strides = tuple[int, ...]
"""For each dim, the distance in memory between neighbours along the dim, in elements."""


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Return the strides of a contiguous tensor.

    >>> contiguous_strides((4, 3, 2))
    (6, 2, 1)
    """
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step = step * max(n, 1) if isinstance(n, int) else step * n  # pyright: ignore[reportUnnecessaryIsInstance] - symbolic
    return tuple(reversed(strides))


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if a tensor with these strides is contiguous; symbolic sizes count by their hints.

    >>> is_contiguous((1, 3), (7, 1)), is_contiguous((2, 3), (1, 2))
    (True, False)
    """
    sizes = [hint(n) for n in shape]
    if 0 in sizes:
        return True
    step = 1
    for n, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if n != 1 and hint(stride) != step:
            return False
        step *= n
    return True


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dims of a dense tensor from the outermost to the innermost in memory; None if it is not dense.

    >>> memory_order((2, 3), (1, 2)), memory_order((2, 3), (6, 1))
    ((1, 0), None)
    """
    sizes, steps = [hint(n) for n in shape], [hint(s) for s in strides]
    order = _with_ones(sizes, steps)
    step = 1
    for d in reversed(order):
        if sizes[d] > 1 and steps[d] != step:
            return None
        step *= max(sizes[d], 1)
    return order


def _with_ones(sizes: Sequence[int], steps: Sequence[int]) -> tuple[int, ...]:
    """Return the dims by descending stride; dims of size 1 keep their place in the shape."""
    moved = iter(sorted((d for d, n in enumerate(sizes) if n > 1), key=lambda d: -steps[d]))
    return tuple(next(moved) if n > 1 else d for d, n in enumerate(sizes))


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> Strides:
    """Return the strides of a dense tensor with its dims in this order in memory, outermost first.

    >>> dense_strides((2, 3, 4), (2, 0, 1))
    (3, 1, 6)
    """
    in_order = contiguous_strides([shape[d] for d in order])
    strides = [0] * len(shape)
    for d, stride in zip(order, in_order, strict=True):
        strides[d] = stride
    return tuple(strides)


@lru_cache(maxsize=4096)
def strides_like(shape: tuple[int, ...], strides: Strides) -> Strides:
    """Return the strides of `torch.empty_like` of a tensor with these strides: the same if dense, else dense ones.

    >>> strides_like((2, 3), (1, 2)), strides_like((2, 3), (6, 1)), strides_like((2, 3), (0, 1))
    ((1, 2), (3, 1), (3, 1))
    """
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def whole_of(values: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a new tensor with these values and strides; elements may only share memory if their values are equal."""
    out = torch.empty_strided(values.shape, tuple(strides), dtype=values.dtype, device=values.device)
    target = out
    for d, stride in enumerate(strides):
        if stride == 0 and values.shape[d] > 1:
            target, values = target.narrow(d, 0, 1), values.narrow(d, 0, 1)
    target.copy_(values)
    return out
