"""Recorded steps of optimizers, for later models and batch sizes with equal parameters and options.

A step of an optimizer of a trusted library depends on the kinds of its parameters and states, on its options and on
torch's state. It does not depend on their numbers. So equal steps are recorded once in a process.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.layout import Cache
from meshwright.tensor import current_random_source

from ..guards import OWN, STEP_HOOKS, global_hooks
from ..program.program import Input, Program
from ..recording.recording import is_lifted, lifted_copy
from ..torch_hooks import backend_flags, is_autocast_on, modes_on
from .optimizer_copy import StateKey, check_step
from .optimizer_states import is_number, state_kind

_PLAIN = (int, float, bool, str, type(None))
KNOWN_STEPS: Cache[Hashable, Any] = Cache(64)
"""Key of a step → what `OptimizerStep.recorded` returned. A step has at most two parameters of each kind."""


def step_key(
    optimizer: Optimizer, names: Mapping[int, str], trained: Sequence[Input], states: Mapping[StateKey, Any]
) -> Hashable | None:
    """Return all that the recording of a step depends on beside layouts; None if this cannot be compared.

    Raises CaptureError for a step that was set on the optimizer.
    """
    check_step(vars(optimizer).get("step"))
    hooks = [hook for hook in _hooks(optimizer) if type(hook) is not FunctionType]
    groups = [_group(group, names) for group in optimizer.param_groups]
    held = _kinds_of_states({i.name for i in trained}, states)
    has_attributes = any(vars(p).keys() - OWN for group in optimizer.param_groups for p in group["params"])
    if hooks or has_attributes or None in groups or held is None or is_autocast_on() or modes_on():
        return None
    inputs = [(i.name, i.value.name, i.value.shape, i.value.dtype, i.value.device, i.spec) for i in trained]
    if not all(type(n) is int for i in trained for n in i.value.shape):
        return None
    code = type(optimizer), type(optimizer).step, tuple(_hooks(optimizer))
    setting = torch.get_default_dtype(), current_random_source(), backend_flags()
    return code, tuple(groups), tuple(inputs), held, setting


def _hooks(optimizer: Optimizer) -> Iterator[Any]:
    """Yield the hooks of the optimizer's steps."""
    for table in (*(getattr(optimizer, name) for name in STEP_HOOKS), *global_hooks()):
        yield from table.values()


def _group(group: Mapping[str, Any], names: Mapping[int, str]) -> Hashable | None:
    """Return the options of a group and the names of its parameters; None for other options than plain values."""
    members = tuple(names.get(id(p)) for p in group["params"])
    options = tuple((key, type(x), x) for key, x in group.items() if key != "params")
    plain = all(_is_plain(x) for _, _, x in options)
    return (members, options) if plain and None not in members else None


def _is_plain(x: object) -> bool:
    return all(map(_is_plain, x)) if type(x) is tuple else type(x) in _PLAIN


def _kinds_of_states(owners: Collection[str], states: Mapping[StateKey, Any]) -> Hashable | None:
    """Return the kinds of the states of these parameters; None for a state that is no tensor and no number."""
    held = [(key, value) for key, value in states.items() if key[0] in owners]
    if not all(isinstance(value, (Tensor, Input)) or is_number(value) for _, value in held):
        return None
    return tuple((key, state_kind(value), value if is_number(value) else None) for key, value in held)


def can_be_known(program: Program) -> bool:
    """True if other models may use the program: it holds no tensors but those that the step makes of numbers."""
    return all(is_lifted(i.source) for i in program.inputs if i.role == "constant")


def with_own_constants(program: Program) -> Program:
    """Return the program with copies of its constants: a step may keep one as a state, and write to it."""
    inputs = (replace(i, source=lifted_copy(i.source)) if i.role == "constant" else i for i in program.inputs)
    return replace(program, inputs=tuple(inputs))
