"""Indexing of a captured tensor by a constant mask: its numbers are known, so the size of the result is known too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.layout import TorchValue
from meshwright.tensor import tensors_in

from ..torch_hooks import FakeTensor, Operator, no_modes, unrecorded

INDEXING = {f"aten::{name}" for name in ("index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put")}
"""Operators whose second argument is a list of indices."""


def masks_of(op: Operator, args: tuple[TorchValue, ...]) -> list[Tensor]:
    """Return the real masks among the indices of a call on captured tensors."""
    if op._schema.name not in INDEXING or not any(isinstance(x, FakeTensor) for x in tensors_in(args)):
        return []
    return [x for x in args[1] if isinstance(x, Tensor) and _is_mask(x)]


def with_positions(args: tuple[TorchValue, ...], is_known: Callable[[Tensor], bool]) -> tuple[TorchValue, ...]:
    """Return the arguments of an indexing operator with the known masks replaced by the positions that they select.

    Torch does the same: a mask of n dims becomes n tensors of indices. A mask of another size stays: torch refuses it.
    """
    x, indices, *rest = args
    found: list[TorchValue] = []
    at = 0
    for index in indices:
        dims = index.dim() if isinstance(index, Tensor) and index.dtype == torch.bool else 1
        fits = isinstance(index, Tensor) and _is_mask(index) and index.shape == x.shape[at : at + dims]
        found += _positions(index) if fits and is_known(index) else [index]
        at += dims
    return x, found, *rest


def _is_mask(x: Tensor) -> bool:
    return x.dtype == torch.bool and x.dim() > 0 and not isinstance(x, FakeTensor)


def _positions(mask: Tensor) -> list[Tensor]:
    """Return the positions along each dim, in memory of their own."""
    with unrecorded(), no_modes():
        return [column.clone() for column in mask.nonzero().unbind(1)]
