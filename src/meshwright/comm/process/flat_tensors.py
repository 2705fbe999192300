"""Tensors as one row of numbers or bytes, as transports move them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..communicators.call import Shape
from ..transport.shared_memory import contiguous_values


def as_bytes(x: Tensor) -> Tensor:
    """Return the bytes of a tensor as one row."""
    return contiguous_values(x).view(-1).view(torch.uint8)


def flat(x: Tensor, op: str) -> Tensor:
    """Return a contiguous tensor as one row; complex numbers as pairs of reals, if the pairs can be summed."""
    return (torch.view_as_real(x) if x.is_complex() and op == "sum" else x).view(-1)


def flat_joined(parts: Sequence[Tensor]) -> Tensor:
    """Return flat tensors one after the other: a view, without a copy, if they are one after the other in memory."""
    joint = _joint_view(parts)
    return torch.cat(list(parts)) if joint is None else joint


def _joint_view(parts: Sequence[Tensor]) -> Tensor | None:
    """Return a view of all flat tensors; None if they are not one after the other in memory."""
    first = parts[0]
    begins = accumulate([part.numel() for part in parts[:-1]], initial=first.storage_offset())
    memory = first.untyped_storage().data_ptr()
    for part, begin in zip(parts, begins, strict=True):
        if part.storage_offset() != begin or part.untyped_storage().data_ptr() != memory:
            return None
    return first.as_strided((sum(part.numel() for part in parts),), (1,))


def joint_bytes(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the bytes of all tensors as one view; None if they are not one after the other in memory."""
    if not parts or not all(part.is_contiguous() for part in parts):
        return None
    joint = _joint_view([part.view(-1) for part in parts])
    return None if joint is None else joint.view(torch.uint8)


def numel(shape: Shape) -> int:
    """Return the number of elements of a tensor of this shape."""
    return torch.Size(shape).numel()


def unpacked(data: Tensor, lengths: Sequence[int], shapes: Sequence[Shape], dtype: torch.dtype) -> list[Tensor]:
    """Return the tensors stored one after the other in `data`; each has its own memory, aligned for its dtype."""
    parts = data.split(list(lengths))
    return [part.clone().view(dtype).view(shape) for part, shape in zip(parts, shapes, strict=True)]
