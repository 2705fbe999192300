"""Refuse steps of optimizers that still hold parameters from before they were distributed."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import cast
from weakref import ReferenceType, ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.tensor import flush, local_parts

from .._errors import TrainingError

_became = cast(MutableMapping[Tensor, ReferenceType[Tensor]], WeakIdKeyDictionary())


def note_replacement(old: Tensor, new: Tensor) -> None:
    """Record that `new` has replaced the parameter `old`."""
    _became[old] = ref(new)


def refuse_stale_parameters() -> None:
    """Refuse, from now on, steps of optimizers that would leave out distributed successors of their parameters."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, *_: object) -> None:
    """Raise TrainingError if a parameter has no gradient, but its distributed successor has one."""
    if not _became:
        return
    laid = [p for group in optimizer.param_groups for p in group["params"] if p in _became and p.grad is None]
    if laid:
        flush()  # flush gradients whose reduction is pending
    with local_parts():  # only the existence of gradients is checked, not their values
        left = [p for p in laid if _has_gradient(p)]
    if left:
        raise TrainingError(
            f"a step of {type(optimizer).__name__}",
            f"{len(left)} parameters without gradients, of shapes such as {tuple(left[0].shape)}, whose distributed "
            "replacements have them",
            "the optimizer was created before the model was distributed, and still holds the old parameters",
            "create the optimizer after the marks, or call mw.parallelize(model, optimizer, mesh, config)",
        )


def _has_gradient(old: Tensor) -> bool:
    """True if a distributed successor of the parameter has a gradient."""
    found = _became.get(old)
    new = found() if found is not None else None
    return new is not None and (new.grad is not None or _has_gradient(new))
