"""The checks before `optimizer.step()` in a loop of the user's own."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from meshwright.comm import current, is_compared
from meshwright.tensor import called_for, count_step, flush

from . import _numbers, _replicas
from ._settings import StepChecks, chosen
from ._tensors import Named, parameters_of, ranks_of, states_of

SHARE = 0.005
"""Most time that comparisons of replicas take, as a share of all steps."""
MOST_STEPS = 10_000


@dataclass(slots=True)
class Rhythm:
    """When replicas are compared next: `every` is 0 until the times of a comparison and of a step are known."""

    step: int = 0
    next: int = 0
    every: int = 0
    took: float = 0.0
    began: float | None = None
    """When the last step was looked at, in seconds."""

    def is_due(self, checks: StepChecks) -> bool:
        """True if the replicas are to be compared before this step."""
        return checks.replicas != 0 and self.step == self.next

    def wish(self) -> int:
        """Return the number of steps between comparisons that this rank wishes; 0 if that is not known yet."""
        now, self.began, before = time.perf_counter(), time.perf_counter(), self.began
        if self.every or self.step == 0 or before is None:
            return self.every
        return min(MOST_STEPS, max(1, math.ceil(self.took / (SHARE * (now - before)))))

    def advance(self, every: int) -> None:
        """Go on to the next step, with comparisons after so many steps."""
        if every and not self.every:
            self.every, self.next = every, max(every, self.step + 1)
        elif self.every and self.step == self.next:
            self.next += self.every
        self.step += 1


_rhythms: WeakKeyDictionary[Optimizer, Rhythm] = WeakKeyDictionary()


def before_step(optimizer: Optimizer) -> bool:
    """Look at gradients and replicas before an update; True if all ranks are to leave the update out.

    Raises NonFiniteGradientError and ReplicaError, on all ranks.
    """
    if not is_compared():
        return False
    flush()
    count_step(optimizer)
    parameters = parameters_of(optimizer)
    group = ranks_of(parameters)
    if len(group) < 2 or current().rank not in group:
        return False
    rhythm = _rhythms.setdefault(optimizer, Rhythm())
    with torch.no_grad(), called_for("the check of a step"):
        return _checked(optimizer, parameters, rhythm, f"step {rhythm.step} of {type(optimizer).__name__}")


def _checked(optimizer: Optimizer, parameters: list[Named], rhythm: Rhythm, step: str) -> bool:
    checks, group = chosen(), ranks_of(parameters)
    found = None
    if rhythm.is_due(checks):
        begin = time.perf_counter()
        found = _replicas.difference([*parameters, *states_of(optimizer, parameters)])
        rhythm.took = time.perf_counter() - begin
    grads = [] if checks.bad_numbers == "off" else [each.tensor.grad for each in parameters]
    mine = _numbers.first_bad(grads)
    told = torch.tensor([mine, -(found is not None), -rhythm.wish()])
    first, differs, wish = current().all_reduce(told, "min", group).tolist()
    if differs:
        raise _replicas.error_of(step, *found) if found is not None else _replicas.error_elsewhere(step)
    rhythm.advance(checks.replicas or -wish)
    if first == _numbers.NONE:
        return False
    error = _numbers.error_of(step, f"the gradient of {parameters[first].name}", mine, group)
    if checks.bad_numbers == "stop":
        raise error
    warnings.warn(f"{error.asked} is left out: {error.found}", RuntimeWarning, stacklevel=4)
    return True
