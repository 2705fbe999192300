"""Fetch the inputs of a program for each call, and bring parameters into the layouts of a program's inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.comm import current_communicator
from meshwright.graph import LOSS_SCALE, Capture, Input, ModelTensor, new_state, unsharded_state_spec
from meshwright.layout import Spec, TorchValue
from meshwright.passes import Merge
from meshwright.tensor import DistTensor, absent, as_part, distribute_as, keep_own_part

from .loss_scale import LossScale

Fetch = Callable[[Sequence[Any]], Any]
"""A function that returns an input of a program, given the leaves of a batch."""


def fetch_of(
    given: Input,
    slots: Sequence[ModelTensor],
    optimizer: Optimizer | None = None,
    scale: LossScale | None = None,
    merge: Merge | None = None,
) -> Fetch:
    """Return the function that fetches the input `given`; `slots` are the model's parameters and buffers.

    `merge` is the split of the batch, if the program takes it in pieces.
    """
    if given.role in ("parameter", "buffer"):
        return _held(slots, given.name)
    if given.role == "batch":
        return _batch(given.source, given.spec, merge)
    if given.role == "size":
        return given.source
    if given.role == "constant":
        return _always(given.source)
    if given.role == "number":
        return _always(given.source(current_communicator()))
    if isinstance(given.source, tuple) and given.source[0] == LOSS_SCALE:
        assert scale is not None
        return _of_scale(scale, given)
    assert optimizer is not None
    return _of_group(optimizer, given.source) if isinstance(given.source, int) else _of_state(optimizer, slots, given)


def _of_scale(scale: LossScale, given: Input) -> Fetch:
    _, key = given.source
    return lambda leaves: scale.held(key, given.value.device)


def _of_group(optimizer: Optimizer, at: int) -> Fetch:
    """Return a function that reads the current learning rate of the group."""
    return lambda leaves: float(optimizer.param_groups[at]["lr"])


def _of_state(optimizer: Optimizer, slots: Sequence[ModelTensor], given: Input) -> Fetch:
    """Return a function that reads the optimizer's current state; loading a state dict replaces the tensors.

    A missing state is created if the program has its first value. The state gets the layout of the program's input,
    also if other steps made it or it was loaded.
    """
    name, key = given.source
    parameter = _held(slots, name)
    states = optimizer.state[parameter(())]
    if key not in states and given.first is not None:
        states[key] = _first_state(given, "meta" if parameter(()).is_meta else given.value.device)
    if given.spec is not None and getattr(states[key], "_spec", None) is not given.spec:
        states[key] = keep_own_part(states[key], given.spec)
    return lambda leaves: optimizer.state[parameter(leaves)][key]


def states_fit(inputs: Iterable[Input], slots: Sequence[ModelTensor], optimizer: Optimizer | None) -> bool:
    """True if a program can take the optimizer's states; missing ones may be created before the first step."""
    if optimizer is None:
        return True
    taken = {i.source: i for i in inputs if i.role in ("state", "scalar") and isinstance(i.source, tuple)}
    held = _forms_of_states(slots, optimizer)
    missing = [given for key, given in taken.items() if key not in held and key[0] != LOSS_SCALE]
    if any(given.first is None for given in missing):
        return False
    return all(key in taken and form == _form_of_input(taken[key]) for key, form in held.items())


def _forms_of_states(slots: Sequence[ModelTensor], optimizer: Optimizer) -> dict[tuple[str, str], object]:
    """Return the form of each state of a trained parameter, by the name of the parameter and the key."""
    found: dict[tuple[str, str], object] = {}
    for slot in slots:
        if slot.is_parameter and slot.tensor.requires_grad:
            states = optimizer.state.get(slot.tensor, {})
            found |= {(slot.name, key): _form(x) for key, x in states.items() if isinstance(x, (Tensor, int, float))}
    return found


def _form(x: Tensor | float) -> object:
    """Return the shape, dtype and device of a state, or the type of a number."""
    return (tuple(x.shape), x.dtype, x.device.type) if isinstance(x, Tensor) else type(x)


def _form_of_input(given: Input) -> object:
    v, shape = given.value, given.value.shape if given.spec is None else given.spec.shape
    return (tuple(shape), v.dtype, v.device.partition(":")[0]) if v.is_tensor else v.dtype


def _first_state(given: Input, device: str) -> Tensor:
    """Return this rank's part of a new state."""
    here, spec = current_communicator(), given.spec
    if spec is None:
        return new_state(given, given.value.shape, None, device)
    strides = None if spec.new.order is None else spec.local_strides(here.rank)
    part = new_state(given, here.local_shape(spec), strides, device)
    return as_part(part, spec) if here.rank in spec.mesh else absent(part, spec)


def _held(slots: Sequence[ModelTensor], name: str) -> Fetch:
    """Return a function that reads the module's current tensor."""
    table, key = next(s.places[0] for s in slots if s.name == name)
    return lambda leaves: table[key]


def _always(value: object) -> Fetch:
    return lambda leaves: value


def _batch(at: int, spec: Spec | None, merge: Merge | None) -> Fetch:
    """Return a function that reads a leaf of the batch, contiguous.

    A plain tensor, whole on every rank, is distributed. If `merge` splits it, each of its pieces is distributed.
    """

    def fetch(leaves: Sequence[Any]) -> TorchValue:
        x = leaves[at]
        if spec is not None and not isinstance(x, DistTensor):
            is_split = merge is not None and at in merge.leaves(leaves)
            x = _distributed(x, spec, merge.pieces if merge is not None and is_split else 1)
        return x.contiguous() if isinstance(x, Tensor) else x

    return fetch


def _distributed(x: Tensor, spec: Spec, pieces: int) -> Tensor:
    """Return this rank's part of a plain tensor: its parts of `pieces` pieces of the rows, one after the other.

    So piece m of the part belongs to piece m of the rows, as on one device.
    """
    if pieces == 1 or not spec.layout.dims[0]:
        return distribute_as(x, spec.mesh, spec.layout)
    parts = [distribute_as(piece, spec.mesh, spec.layout) for piece in x.chunk(pieces)]
    return torch.cat([part.as_subclass(Tensor) for part in parts])


def apply_captured_layouts(captured: Capture, optimizer: Optimizer | None) -> None:
    """Give parameters, buffers and their states the layouts of the captured program's inputs."""
    apply_input_layouts(captured.program.inputs, captured.slots, optimizer)


def apply_input_layouts(inputs: Iterable[Input], slots: Sequence[ModelTensor], optimizer: Optimizer | None) -> None:
    """Give parameters, buffers and their states the layouts of the inputs."""
    held = {i.name: i for i in inputs if i.role in ("parameter", "buffer")}
    for slot in slots:
        given = held[slot.name]
        if given.spec is None:
            continue
        lies = isinstance(slot.tensor, DistTensor) and slot.tensor.spec is given.spec
        states = optimizer.state.get(slot.tensor, {}) if optimizer is not None else {}
        for key, value in states.items():
            spec = unsharded_state_spec(value, given) if isinstance(value, Tensor) else None
            if spec is not None and not (lies and isinstance(value, DistTensor)):
                states[key] = keep_own_part(value, spec)
        if not lies:
            keep_own_part(slot.tensor, given.spec)
