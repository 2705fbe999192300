"""States of an optimizer while its step is recorded: what stands in for them, and which of them are alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.layout import Spec
from meshwright.tensor import DistTensor

from .._node import Value
from .._program import Input
from .._record import Recorder
from ._twin import StateKey


def stand_in(recorder: Recorder, key: StateKey, value: Any, parameter: Input | None, moved: bool) -> Any:
    """Return the input of the program for a state; what is neither a tensor nor a number stays what it is."""
    if isinstance(value, Input):
        return recorder.add(value)
    if is_number(value):
        return recorder.add_number(".".join(key), value, key)
    if not isinstance(value, Tensor):
        return value
    spec = value.spec if isinstance(value, DistTensor) and not moved else lies_as(value, parameter)
    name = ".".join(key)
    return recorder.add(
        Input(Value(name, tuple(value.shape), value.dtype, str(value.device)), "state", name, spec, key)
    )


def lies_as(state: Tensor, parameter: Input | None) -> Spec | None:
    """Return the spec of a whole state: that of its parameter if it has the shape of the parameter."""
    spec = None if parameter is None else parameter.spec
    fits = spec is not None and tuple(spec.shape) == tuple(state.shape) and state.dim() > 0
    return spec.with_dtype(state.dtype) if spec is not None and fits else None


def is_number(x: Any) -> bool:
    """True for a number, symbolic ones too, that is no bool."""
    return isinstance(x, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(x, bool)


def form_of(state: Any) -> Any:
    """Return what two states share that are recorded alike."""
    if isinstance(state, Input):
        return state.value.shape, state.value.dtype, state.value.device, state.spec
    if isinstance(state, Tensor):
        return tuple(state.shape), state.dtype, str(state.device), getattr(state, "_spec", None)
    return (type(state), state > 0) if is_number(state) else id(state)
