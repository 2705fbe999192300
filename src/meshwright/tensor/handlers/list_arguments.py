"""Functions with lists among their arguments: tensors to broadcast together, and integers as indices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from .._torch_call import TorchFunction
from ..autograd.user_functions import plain_are_whole
from ..core.dist_tensor import DistTensor
from ..core.handler_registry import handles
from ..core.tree import tensors_in


@handles(torch.broadcast_tensors, torch.ops.aten.broadcast_tensors.default)
def _broadcast_tensors(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    tensors = args[0] if len(args) == 1 and not isinstance(args[0], Tensor) else args
    shape = torch.broadcast_shapes(*[t.shape for t in tensors])
    return tuple(t if t.shape == shape else t.expand(shape) for t in tensors)


@handles(Tensor.__getitem__, Tensor.__setitem__)
def _listed_index(func: TorchFunction, types: Sequence[type], args: TorchValue, kwargs: TorchValue) -> TorchValue:
    """Replace lists of integers among the indices by tensors.

    torch would make these tensors in C++, where their values are not recorded.
    """
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not any(_is_whole_numbers(i) for i in index):
        return NotImplemented
    given = all(isinstance(t, DistTensor) for t in tensors_in(args))
    with plain_are_whole() if given else nullcontext():  # a list is whole in a backward pass too
        return func(
            args[0], tuple(torch.tensor(i, device="cpu") if _is_whole_numbers(i) else i for i in index), *args[2:]
        )


def _is_whole_numbers(x: TorchValue) -> bool:
    return isinstance(x, list) and bool(x) and all(type(n) is int or _is_whole_numbers(n) for n in x)
