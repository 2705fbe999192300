"""Gradients that are not finite: all ranks exchange their findings before an update."""

from __future__ import annotations

from cmath import isfinite
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.comm import Group, current_communicator
from meshwright.layout import CPU, warn_user
from meshwright.tensor import local_parts

from .._errors import NonFiniteGradientError
from .named_tensors import listed
from .step_checks import StepChecks

_LONGEST = 200
"""Maximum length in bytes of a tensor's name that ranks send each other."""
_MOST_BESIDE = 1.25
"""Elements of a base for each element of its views, up to which the base is read in place of the views."""
_BYTES = 4
"""Numbers of fewer bytes are added up as float32: their own sums would overflow."""


def should_skip_update(gradients: Mapping[str, Tensor | None], checks: StepChecks, step: str, group: Group) -> bool:
    """True if an update is to be left out, because a gradient of some rank has elements that are not finite.

    Every rank of the group makes the call, with gradients of its own, by the names of their parameters. All calls are
    compared by then, so that no result of a mismatched call reaches a parameter.

    Raises:
        NonFiniteGradientError: there is such a gradient, and `bad_numbers` is "stop"; raised on all ranks.
    """
    current_communicator().settle()
    if checks.bad_numbers == "off":
        return False
    bad = first_bad(gradients)
    if not current_communicator().any_true(bad is not None, group):
        return False
    error = non_finite_error(step, "" if bad is None else f"the gradient of {bad}", group)
    if checks.bad_numbers == "stop":
        raise error
    warn_user(f"{error.asked} is skipped: {error.found}", RuntimeWarning)
    return True


def first_bad(tensors: Mapping[str, Tensor | None]) -> str | None:
    """Return the name of the first tensor whose local part has a number that is not finite; None if none has."""
    with local_parts():
        held = [x for x in tensors.values() if x is not None and _has_fractions(x)]
        if _sums_are_finite(_joint_memory(held)):
            return None
        return next((name for name, x in tensors.items() if x is not None and not _is_finite(x)), None)


def _has_fractions(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _is_finite(x: Tensor) -> bool:
    return not _has_fractions(x) or bool(_wide(x).isfinite().all())


def _joint_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return fewer tensors with all elements of these: for views that fill most of their base, the base itself.

    Gradients that were reduced together are views of one bucket.
    """
    views: dict[int, tuple[Tensor, list[Tensor]]] = {}
    found: list[Tensor] = []
    for x in tensors:
        base = x._base
        if base is None or base.dtype != x.dtype:
            found.append(x)
        else:
            views.setdefault(id(base), (base, []))[1].append(x)
    for base, parts in views.values():
        is_filled = base.numel() <= _MOST_BESIDE * sum(map(Tensor.numel, parts))
        found += [base] if is_filled else parts
    return found


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
    return all(_are_finite(totals) for totals in found.values())


def _are_finite(totals: Sequence[Tensor]) -> bool:
    """True if numbers of one device and dtype are finite.

    A device is asked once. On the CPU, reading each number is faster than two operators, which no step has in cache.
    """
    read = totals if totals[0].device.type == CPU else [torch.stack(list(totals)).sum()]
    numbers: list[Any] = [x.tolist() for x in read]  # `item` calls a kernel in Python (`guard_operator`)
    return all(map(isfinite, numbers))


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
