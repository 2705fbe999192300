"""Optimizer steps on local parts, as fast as on plain tensors, if parameter, gradient and states have one layout.

Most optimizers compute each element from the same element of the parameter, the gradient and the states. If these have
one layout, a rank's step is the optimizer's own code on its local parts, and no operator is planned. New states get the
layout of their parameter. Other layouts and other optimizers run operator by operator. A gradient has the dual layout
of its parameter. If each rank uses the parameter differently, the gradient is a sum over ranks, which is reduced first.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from meshwright.layout import Spec, TorchValue
from meshwright.tensor import (
    DistTensor,
    OperationError,
    absent,
    as_part,
    flush,
    local_parts,
    parts_recorded,
    recording,
)

from ..checks import before_step
from ..torch_hooks import foreach_devices

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset({
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
})  # fmt: skip
"""Optimizer classes that work element by element and keep states in place; subclasses are excluded."""
StepArguments = tuple[tuple[Optimizer], dict[str, Any]]
"""Arguments with which torch goes on with a step: the optimizer, and nothing else."""
_hooks: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()


def watch_steps() -> None:
    """Run the steps of torch's optimizers on local parts from now on, if that gives the same numbers."""
    register_optimizer_step_pre_hook(_check_and_hook)


def own_hook(optimizer: Optimizer) -> int | None:
    """Return the number of the hook that `watch_steps` has registered on an optimizer, or None."""
    return _hooks[optimizer].id if optimizer in _hooks else None


def _check_and_hook(optimizer: Optimizer, *_: object) -> StepArguments | None:
    """Run the checks before each step, and register `_step` as the last hook: other hooks may change layouts."""
    if not parts_recorded() and before_step(optimizer):
        return (_without_parameters(optimizer),), {}
    if isinstance(optimizer, torch.optim.SparseAdam):
        _check_plain(optimizer)
    if type(optimizer) in ELEMENTWISE and not parts_recorded():
        if optimizer in _hooks:
            _hooks[optimizer].remove()
        _hooks[optimizer] = optimizer.register_step_pre_hook(_step)
    return None


def _check_plain(optimizer: Optimizer) -> None:
    """Raise OperationError if SparseAdam has distributed parameters: their gradients are dense."""
    for group in optimizer.param_groups:
        found = next((p for p in group["params"] if isinstance(p, DistTensor)), None)
        if found is not None:
            raise OperationError(
                "torch.optim.SparseAdam.step()",
                f"a distributed parameter, {found.spec!r}",
                "its gradient is dense and does not say which rows were looked up",
                "use torch.optim.Adam, or SGD or Adagrad, which give the same numbers for dense gradients",
            )


def _step(optimizer: Optimizer, args: tuple[TorchValue, ...], kwargs: dict[str, TorchValue]) -> StepArguments | None:
    """Run the step on local parts if possible; torch then goes on with an optimizer that has no parameters."""
    is_left_out = args and args[0] is not optimizer
    if is_left_out or len(args) > 1 or kwargs or recording() or not _has_parameter_layouts(optimizer):
        return None
    kind: TorchValue = type(optimizer)
    with _as_lists(optimizer), local_parts():
        try:
            kind.step.__wrapped__(optimizer)  # without the hooks
        finally:
            _distribute_new_states(optimizer)
        _count_writes(optimizer)
    return (_without_parameters(optimizer),), {}


def _without_parameters(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same kind whose step does nothing."""
    nothing: Optimizer = object.__new__(type(optimizer))
    nothing.__dict__.update(optimizer.__dict__, param_groups=[], state={})
    return nothing


def _distribute_new_states(optimizer: Optimizer) -> None:
    """Make new states with the shape of the local part distributed, in the layout of their parameter.

    Counters have no dims and stay plain.
    """
    for p, states in optimizer.state.items():
        if not isinstance(p, DistTensor):
            continue
        for key, x in states.items():
            if isinstance(x, Tensor) and not isinstance(x, DistTensor) and x.dim() and x.size() == p.size():
                spec = p.spec.with_dtype(x.dtype)
                states[key] = absent(x, spec) if p._away else as_part(x, spec)


def _count_writes(optimizer: Optimizer) -> None:
    """Move the version counters of parameters that fused kernels wrote to, so that copied views are read again."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            increment_version([p for p in group["params"] if p.grad is not None])


def _has_parameter_layouts(optimizer: Optimizer) -> bool:
    """True if every parameter with a gradient is distributed, and its gradient and states have its layout.

    A view that is a copy has to be written back, which the step on parts does not do.
    """
    flush()
    found = False
    with local_parts():  # avoids the conversion of pending gradients to distributed tensors
        for group in optimizer.param_groups:
            if _needs_operators(group):
                return False
            for p in group["params"]:
                if p.grad is None:
                    continue
                spec = p.spec if isinstance(p, DistTensor) else None
                found = found or spec is not None
                if spec is not None and (p._viewing or not _has_equal_dual(spec, p.grad)):
                    return False
                states = optimizer.state[p].values() if p in optimizer.state else ()
                if not all(_has_layout_of(spec, state) for state in states):
                    return False
    return found


def _needs_operators(group: Mapping[str, Any]) -> bool:
    """True if a parameter group has a differentiable step, or a distributed tensor among its options."""
    return bool(group.get("differentiable")) or any(isinstance(value, DistTensor) for value in group.values())


def _has_equal_dual(spec: Spec, grad: Tensor) -> bool:
    """True if the gradient of a parameter with this spec has the parameter's layout."""
    if isinstance(grad, DistTensor) and grad._viewing:
        return False
    have = grad.spec if isinstance(grad, DistTensor) else spec.dual()
    return have.mesh is spec.mesh and have.layout == spec.layout


def _has_layout_of(spec: Spec | None, state: object) -> bool:
    """True if a state has the layout of its parameter's `spec`, or is a counter, which every rank has."""
    if not isinstance(state, DistTensor):
        return not isinstance(state, Tensor) or not state.dim() or spec is None
    have = state.spec
    if state._viewing:
        return False
    return have is spec or (spec is not None and have.mesh is spec.mesh and have.layout == spec.layout)


@contextmanager
def _as_lists(optimizer: Optimizer) -> Generator[None]:
    """Set `foreach` where torch would choose it for plain parameters: on some devices, if the user has not set it."""
    groups = [g for g in optimizer.param_groups if g.get("foreach", False) is None]
    fast = foreach_devices()
    groups = [g for g in groups if all(p.device.type in fast and p.is_floating_point() for p in g["params"])]
    for group in groups:
        group["foreach"] = True
    try:
        yield
    finally:
        for group in groups:
            group["foreach"] = None
