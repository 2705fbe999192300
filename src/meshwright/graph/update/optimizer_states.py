"""States of an optimizer during the recording of its step: their inputs, and a key for equal kinds of states."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from meshwright.layout import Spec, TorchValue
from meshwright.tensor import DistTensor

from ..program.node import Value
from ..program.program import Input
from ..replay.recorder import Recorder
from .optimizer_copy import StateKey


def add_state_input(
    recorder: Recorder, key: StateKey, value: TorchValue, parameter: Input | None, moved: bool
) -> TorchValue:
    """Add a state as an input of the program and return its fake tensor or symbol. Other objects are returned as is."""
    if isinstance(value, Input):
        return recorder.add(value)
    if is_number(value):
        return recorder.add_number(".".join(key), value, key)
    if not isinstance(value, Tensor):
        return value
    spec = value.spec if isinstance(value, DistTensor) and not moved else unsharded_state_spec(value, parameter)
    name = ".".join(key)
    return recorder.add(Input(Value.of(name, value), "state", name, spec, key))


def unsharded_state_spec(state: Tensor, parameter: Input | None) -> Spec | None:
    """Return the spec for an unsharded state: its parameter's spec if the shapes are equal, otherwise None."""
    spec = None if parameter is None else parameter.spec
    fits = spec is not None and tuple(spec.shape) == tuple(state.shape) and state.dim() > 0
    return spec.with_dtype(state.dtype) if spec is not None and fits else None


def is_number(x: object) -> bool:
    """True for an int or float, also a symbolic one, but not for a bool."""
    return isinstance(x, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(x, bool)


def state_kind(state: TorchValue) -> Hashable:
    """Return a key that is equal for states that are recorded in the same way."""
    if isinstance(state, Input):
        return state.value.shape, state.value.dtype, state.value.device, state.spec
    if isinstance(state, Tensor):
        return tuple(state.shape), state.dtype, str(state.device), getattr(state, "_spec", None)
    return (type(state), state > 0) if is_number(state) else id(state)
