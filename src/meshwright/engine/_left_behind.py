"""Parameters that have become distributed ones, and optimizers that still hold what they were."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, cast
from weakref import ReferenceType, ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.tensor import flush, local_parts

from ._errors import TrainingError

_became = cast(MutableMapping[Tensor, ReferenceType[Tensor]], WeakIdKeyDictionary())


def note_laid(old: Tensor, new: Tensor) -> None:
    """From now on `new` stands for the parameter `old`."""
    _became[old] = ref(new)


def watch_left_behind() -> None:
    """From now on a step that would leave out what parameters have become is refused."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, *_: Any) -> None:
    """Raises TrainingError where a parameter has no gradient, but what it was laid as has one."""
    if not _became:
        return
    laid = [p for group in optimizer.param_groups for p in group["params"] if p in _became and p.grad is None]
    if laid:
        flush()  # gradients that are still to be added up
    with local_parts():  # whether there is a gradient, not what it is
        left = [p for p in laid if _has_gradient(p)]
    if left:
        raise TrainingError(
            f"a step of {type(optimizer).__name__}",
            f"{len(left)} parameters without gradients, of shapes such as {tuple(left[0].shape)}, whose distributed "
            "successors have them",
            "the optimizer was made before the model was laid over the mesh, and holds what its parameters were",
            "the optimizer behind the marks, or mw.parallelize(model, optimizer, mesh, config), which takes it along",
        )


def _has_gradient(old: Tensor) -> bool:
    """Whether what the parameter has become, or that in turn, has a gradient."""
    found = _became.get(old)
    new = found() if found is not None else None
    return new is not None and (new.grad is not None or _has_gradient(new))
