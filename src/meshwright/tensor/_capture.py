"""Capturing one call: which ATen operators it makes of its global arguments, before autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import Spec

from ._tree import map_tensors
from .torch_hooks import Operator, record_operators


@dataclass(frozen=True, slots=True)
class Node:
    """One operator call on global meta tensors, and what it gave."""

    op: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


@dataclass(frozen=True, slots=True)
class Captured:
    """A call as operators: `inputs` are the meta tensors that stand for its tensor arguments, one per occurrence."""

    inputs: tuple[Tensor, ...]
    nodes: tuple[Node, ...]
    out: Any


def capture(func: Callable[..., Any], args: Any, kwargs: Any, spec_of: Callable[[Tensor], Spec | None]) -> Captured:
    """The operators that `func(*args, **kwargs)` makes when its distributed arguments are whole.

    Nothing is computed: tensors are on the meta device. Raises whatever torch raises for such arguments.
    """
    inputs: list[Tensor] = []

    def stand_in(x: Tensor) -> Tensor:
        spec = spec_of(x)
        shape, dtype = (spec.shape, spec.dtype) if spec is not None else (x.shape, x.dtype)
        inputs.append(torch.empty(shape, dtype=dtype, device="meta"))
        return inputs[-1]

    nodes: list[Node] = []
    meta_args, meta_kwargs = map_tensors(stand_in, args), map_tensors(stand_in, kwargs)
    out = record_operators(lambda: func(*meta_args, **meta_kwargs), lambda *node: nodes.append(Node(*node)))
    return Captured(tuple(inputs), tuple(nodes), out)
