"""Gradients that are not finite: all ranks exchange their findings before an update."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from meshwright.comm import Group, current
from meshwright.tensor import local_parts

from .._errors import NonFiniteGradientError
from ._settings import StepChecks

NONE = 2**31
"""The index for no tensor; larger than any index."""
_BYTES = 4
"""Numbers of fewer bytes are added up as float32: their own sums would overflow."""


def leaves_out(tensors: Mapping[str, Tensor | None], checks: StepChecks, step: str, group: Group) -> bool:
    """True if an update is to be left out, because a tensor of some rank has elements that are not finite.

    Every rank of the group makes the call, with tensors of the same names in the same order. All pending comparisons of
    calls are settled first, so no result of a mismatched call reaches a parameter.

    Raises:
        NonFiniteGradientError: there is such a tensor, and `bad_numbers` is "stop"; raised on all ranks.
    """
    current().settle()
    if checks.bad_numbers == "off":
        return False
    names = list(tensors)
    mine = first_bad([tensors[name] for name in names])
    first = int(current().all_reduce(torch.tensor([mine]), "min", group))
    if first == NONE:
        return False
    error = error_of(step, names[first], mine, group)
    if checks.bad_numbers == "stop":
        raise error
    warnings.warn(f"{error.asked} is left out: {error.found}", RuntimeWarning, stacklevel=5)
    return True


def first_bad(tensors: Sequence[Tensor | None]) -> int:
    """Return the index of the first tensor with an element in its local part that is not finite, or NONE."""
    with local_parts():
        held = {at: x for at, x in enumerate(tensors) if x is not None and x.numel() and _has_fractions(x)}
        if _sums_are_finite(held.values()):
            return NONE
        return next((at for at, x in held.items() if not bool(_wide(x).isfinite().all())), NONE)


def _has_fractions(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _wide(x: Tensor) -> Tensor:
    """Return a tensor of a dtype with all operators; dtypes of one byte have few."""
    return x if x.dtype.itemsize > 1 else x.float()


def _sums_are_finite(tensors: Iterable[Tensor]) -> bool:
    """True if the sum of each tensor is finite, and thus every number in it: one that is not stays so in all sums.

    A sum is read once from memory, 20 times as fast as `isfinite` or the largest number on a CPU.
    """
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for x in tensors:
        total = x.sum(dtype=torch.float32 if x.dtype.itemsize < _BYTES else None)
        found.setdefault((total.device, total.dtype), []).append(total)
    return all(bool(torch.stack(totals).sum().isfinite()) for totals in found.values())


def error_of(step: str, name: str, mine: int, group: Group) -> NonFiniteGradientError:
    """Return the error about the first tensor that is not finite; every rank of the group makes the call."""
    here = current()
    all_firsts = [int(x) for x in here.all_gather(torch.tensor([mine]), group, [(1,)] * len(group))]
    ranks = ", ".join(str(rank) for rank, first in zip(group, all_firsts, strict=True) if first != NONE)
    return NonFiniteGradientError(
        f"the update of {step}", f"{name} has numbers that are not finite on rank {ranks}",
        "an update with it would put numbers that are none into every parameter",
        "a smaller learning rate, mw.clip_grad_norm_, or other data; mw.check_steps(bad_numbers='skip') leaves such "
        "steps out on all ranks. The parameters are those of before the step",
    )  # fmt: skip
