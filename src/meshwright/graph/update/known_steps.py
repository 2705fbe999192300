"""Recorded steps of optimizers, for later models and batch sizes with equal parameters and options.

A step of an optimizer of a trusted library depends on the kinds of its parameters and states, on its options, on the
rules of operators, and on torch's state and functions. It does not depend on numbers in tensors. So equal steps are
recorded once in a process.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.layout import Cache
from meshwright.spmd import registration_callbacks
from meshwright.tensor import current_random_source

from ..guards import OPTIMIZER, OWN, STEP_HOOKS, global_hooks, is_installed_file
from ..program.program import Input, Program
from ..recording.recording import is_lifted, lifted_copy
from ..torch_hooks import backend_flags, is_autocast_on, modes_on
from .optimizer_copy import StateKey, check_step
from .optimizer_states import is_number, state_kind

_PLAIN = (int, float, bool, str, type(None))
KNOWN_STEPS: Cache[Hashable, Any] = Cache(64)
"""Key of a step → what `OptimizerStep.recorded` returned. A step has at most two parameters of each kind."""
registration_callbacks.append(KNOWN_STEPS.clear)


def step_key(
    optimizer: Optimizer, names: Mapping[int, str], trained: Sequence[Input], states: Mapping[StateKey, Any]
) -> Hashable | None:
    """Return all that the recording of a step depends on beside layouts; None if this cannot be compared.

    Raises CaptureError for a step that was set on the optimizer.
    """
    check_step(vars(optimizer).get("step"))
    has_attributes = any(vars(p).keys() - OWN for group in optimizer.param_groups for p in group["params"])
    if has_attributes or is_autocast_on() or modes_on():
        return None
    parts = (
        _functions(type(optimizer)),
        _hooks(optimizer),
        _attributes(optimizer),
        *(_group(group, names) for group in optimizer.param_groups),
        _kinds_of_parameters(trained),
        _kinds_of_states({i.name for i in trained}, states),
    )
    setting = torch.get_default_dtype(), current_random_source(), backend_flags()
    return None if None in parts else (type(optimizer), parts, setting)


def _functions(kind: type[Optimizer]) -> Hashable | None:
    """Return the functions of torch, of tensors and of the optimizer's modules, which user code may have replaced.

    Returns None if one of them is user code: it may read values that change.
    """
    spaces = [vars(torch), vars(Tensor)]
    for base in kind.__mro__[:-1]:
        spaces += [vars(sys.modules[base.__module__]), vars(base)]
    found = tuple(x for space in spaces for x in tuple(space.values()) if callable(x))
    codes = (getattr(x, "__code__", None) for x in found)
    return found if all(code is None or is_installed_file(code.co_filename) for code in codes) else None


def _hooks(optimizer: Optimizer) -> Hashable | None:
    """Return the hooks of the optimizer's steps; None for a hook that is no function."""
    tables = (*(getattr(optimizer, name) for name in STEP_HOOKS), *global_hooks())
    found = tuple(hook for table in tables for hook in table.values())
    return found if all(type(hook) is FunctionType for hook in found) else None


def _attributes(optimizer: Optimizer) -> Hashable | None:
    """Return the optimizer's defaults, which some steps read, and its other attributes except hooks."""
    others = {key: x for key, x in vars(optimizer).items() if key not in OPTIMIZER and not key.endswith("_hooks")}
    return _options({**others, **{f"defaults.{key}": x for key, x in optimizer.defaults.items()}})


def _group(group: Mapping[str, Any], names: Mapping[int, str]) -> Hashable | None:
    """Return the options of a group and the names of its parameters; None for other options than plain values."""
    members = tuple(names.get(id(p)) for p in group["params"])
    options = _options({key: x for key, x in group.items() if key != "params"})
    return None if options is None or None in members else (members, options)


def _options(options: Mapping[str, Any]) -> Hashable | None:
    """Return options with their types; None for other options than plain values."""
    return tuple((key, type(x), x) for key, x in options.items()) if all(map(_is_plain, options.values())) else None


def _is_plain(x: object) -> bool:
    return all(map(_is_plain, x)) if type(x) is tuple else type(x) in _PLAIN


def _kinds_of_parameters(trained: Sequence[Input]) -> Hashable | None:
    """Return the names and kinds of the parameters; None if they have symbolic sizes."""
    found = tuple((i.name, i.value.name, i.value.shape, i.value.dtype, i.value.device, i.spec) for i in trained)
    return found if all(type(n) is int for i in trained for n in i.value.shape) else None


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
