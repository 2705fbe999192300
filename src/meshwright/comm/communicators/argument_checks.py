"""Checks of the arguments of collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._errors import CallError
from .call import Group, Shape


def shapes_of(shapes: Sequence[Sequence[int]]) -> tuple[Shape, ...]:
    """Return the shapes as tuples."""
    return tuple([tuple(shape) for shape in shapes])


def check_length(kind: str, found: Sequence[object], word: str, group: Group) -> None:
    """Raise CallError unless a call has one tensor or shape for each rank of the group."""
    if len(found) != len(group):
        raise CallError(
            f"{kind} on {len(group)} ranks",
            f"{len(found)} {word}",
            f"the number of {word} must be the number of ranks",
            f"pass {word}[i] for group[i]",
        )


def one_dtype(kind: str, pieces: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of all pieces. Raises CallError if they differ."""
    dtype = pieces[0].dtype
    for piece in pieces:
        if piece.dtype != dtype:
            raise CallError(
                kind, f"pieces of {dtype} and {piece.dtype}", "a call has one dtype", "call piece.to(dtype)"
            )
    return dtype


def wrong_shape(kind: str, asked: str, found: str) -> CallError:
    """Return the error for a tensor of another shape than the call asks for."""
    return CallError(f"{kind}: {asked}", found, "the two must be equal", "take the shapes from the tensor's layout")
