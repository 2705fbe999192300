"""Local forms whose recorded programs read every operand on every rank.

On a rank without a piece, a form may return nothing and not read its operands, such as the ids of a lookup in a table
without rows. In a recorded program, the conversion of such an operand would be dead code on this rank alone, and the
other ranks would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from meshwright.layout import TorchValue

from .._torch_call import TorchFunction
from ..core.tree import map_tensors, tensors_in
from ..torch_hooks import FakeTensor


def reading_all_operands(form: TorchFunction) -> TorchFunction:
    """Return the form with an extra read of one element of each operand while it is recorded; values stay the same."""

    def used(call: object, *args: TorchValue, **kwargs: TorchValue) -> TorchValue:
        out, given = form(call, *args, **kwargs), list(tensors_in((args, kwargs)))
        if not any(isinstance(t, FakeTensor) for t in given):
            return out
        flag = _flag(given)
        return map_tensors(lambda y: torch.where(flag, y, y), out)

    return used


def _flag(given: Sequence[Tensor]) -> Tensor:
    """Return a boolean scalar that depends on all the tensors."""
    with torch.no_grad():
        firsts = [t.detach()[tuple(slice(0, 1) for _ in t.shape)] for t in given]
        return reduce(torch.logical_or, [(t != 0).any() for t in firsts])
