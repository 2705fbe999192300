"""The checks before `optimizer.step()` in a loop of the user's own."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.comm import current_communicator, is_compared
from meshwright.tensor import DistTensor, collectives_of_call, flush, local_parts, renumber_parameters

from .comparison_steps import Rhythm, compare_replicas
from .finite_gradients import should_skip_update
from .named_tensors import on_all, parameters_of, ranks_of, states_of
from .step_checks import current_checks

_rhythms: WeakKeyDictionary[Optimizer, Rhythm] = WeakKeyDictionary()


def before_step(optimizer: Optimizer) -> bool:
    """Look at replicas and gradients before an update; True if all ranks are to leave the update out.

    Raises:
        ReplicaError: ranks that should hold the same numbers do not.
        NonFiniteGradientError: a gradient has numbers that are not finite. Both are raised on all ranks.
    """
    if not is_compared():
        return False
    flush()
    renumber_parameters(optimizer)
    parameters = parameters_of(optimizer)
    group = ranks_of(parameters)
    if len(group) < 2 or current_communicator().rank not in group:
        return False
    checks, rhythm = current_checks(), _rhythms.setdefault(optimizer, Rhythm())
    step = f"step {rhythm.step} of {type(optimizer).__name__}"
    with torch.no_grad(), collectives_of_call("the check of a step", on_all(parameters, group)):
        compare_replicas(rhythm, checks, lambda: [*parameters, *states_of(optimizer, parameters)], step, group)
        with local_parts():
            grads = {each.name: each.tensor.grad for each in parameters if _is_here(each.tensor)}
        return should_skip_update(grads, checks, step, group)


def _is_here(x: Tensor) -> bool:
    """True if this rank has a part of `x`; the numbers of a tensor of another pipeline stage mean nothing here."""
    return not isinstance(x, DistTensor) or current_communicator().rank in x.spec.mesh
