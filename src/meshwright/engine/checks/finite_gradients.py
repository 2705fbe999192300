"""Gradients that are not finite: all ranks exchange their findings before an update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from meshwright.comm import Group, current_communicator
from meshwright.layout import warn_user
from meshwright.tensor import local_parts

from .._errors import NonFiniteGradientError
from .named_tensors import listed
from .step_checks import StepChecks

_LONGEST = 200
"""Maximum length in bytes of a tensor's name that ranks send each other."""
_BYTES = 4
"""Numbers of fewer bytes are added up as float32: their own sums would overflow."""


def should_skip_update(tensors: Mapping[str, Tensor | None], checks: StepChecks, step: str, group: Group) -> bool:
    """True if an update is to be left out, because a tensor of some rank has elements that are not finite.

    Every rank of the group makes the call, with tensors of its own. All calls are compared by then, so that no result
    of a mismatched call reaches a parameter.

    Raises:
        NonFiniteGradientError: there is such a tensor, and `bad_numbers` is "stop"; raised on all ranks.
    """
    current_communicator().settle()
    if checks.bad_numbers == "off":
        return False
    bad = first_bad(tensors)
    if not current_communicator().any_true(bad is not None, group):
        return False
    error = non_finite_error(step, bad or "", group)
    if checks.bad_numbers == "stop":
        raise error
    warn_user(f"{error.asked} is skipped: {error.found}", RuntimeWarning)
    return True


def first_bad(tensors: Mapping[str, Tensor | None]) -> str | None:
    """Return the name of the first tensor whose local part has a number that is not finite; None if none has."""
    with local_parts():
        held = {name: x for name, x in tensors.items() if x is not None and x.numel() and _has_fractions(x)}
        if _sums_are_finite(held.values()):
            return None
        return next((name for name, x in held.items() if not bool(_wide(x).isfinite().all())), None)


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


def non_finite_error(step: str, bad: str, group: Group) -> NonFiniteGradientError:
    """Return the error about the first bad tensor of each rank; "" if it has none. Every rank of the group calls it."""
    ranks_of: dict[str, list[str]] = {}
    for rank, name in zip(group, _names_of_all(bad, group), strict=True):
        if name:
            ranks_of.setdefault(name, []).append(str(rank))
    told = [f"{name} has non-finite numbers on rank {', '.join(ranks)}" for name, ranks in ranks_of.items()]
    return NonFiniteGradientError(
        f"the update of {step}",
        listed(told),
        "the update would write NaN or infinity into parameters",
        "lower the learning rate, clip with mw.clip_grad_norm_, or check the data. Or use mw.check_steps('skip') "
        "to skip such steps on all ranks. The parameters are those from before the step",
    )


def _names_of_all(name: str, group: Group) -> list[str]:
    """Return the names of all ranks of a group."""
    mine = torch.zeros(_LONGEST, dtype=torch.uint8, device="cpu")
    data = name.encode()[:_LONGEST]
    mine[: len(data)] = torch.tensor(list(data), dtype=torch.uint8, device="cpu")
    rows = current_communicator().all_gather(mine, group, [(_LONGEST,)] * len(group))
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
