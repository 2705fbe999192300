"""Gradients that are not finite: the first one, of which all ranks tell each other before an update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from meshwright.comm import Group, current
from meshwright.tensor import local_parts

from .._errors import NonFiniteGradientError

NONE = 2**31
"""Stands for no tensor; larger than the place of any."""


def first_bad(tensors: Sequence[Tensor | None]) -> int:
    """Return the place of the first tensor whose local part has a number that is not finite; NONE if none has."""
    with local_parts():
        held = {at: x for at, x in enumerate(tensors) if x is not None and x.numel() and _has_fractions(x)}
        if not held or bool(get_total_norm(list(held.values()), float("inf")).isfinite()):
            return NONE
        return next((at for at, x in held.items() if not bool(x.isfinite().all())), NONE)


def _has_fractions(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def error_of(step: str, name: str | None, mine: int, group: Group) -> NonFiniteGradientError:
    """Return the error about the first bad tensor; every rank of the group makes the call.

    `name` is None on a rank that does not know the tensor: a stage of a pipeline has parameters of its own.
    """
    here = current()
    all_firsts = [int(x) for x in here.all_gather(torch.tensor([mine]), group, [(1,)] * len(group))]
    ranks = ", ".join(str(rank) for rank, first in zip(group, all_firsts, strict=True) if first != NONE)
    return NonFiniteGradientError(
        f"the update of {step}", f"{name or 'a tensor of theirs'} has numbers that are not finite on rank {ranks}",
        "an update with it would put numbers that are none into every parameter",
        "a smaller learning rate, mw.clip_grad_norm_, or other data; mw.check_steps(bad_numbers='skip') leaves such "
        "steps out on all ranks. The parameters are those of before the step",
    )  # fmt: skip
