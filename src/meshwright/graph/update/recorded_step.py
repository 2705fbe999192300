"""Recording of an optimizer's own `step`: a copy of the optimizer works on fake parameters, gradients and states."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.layout import Spec
from meshwright.tensor import DistTensor, redistribute

from .._errors import CaptureError
from ..guards import OWN, STEP_HOOKS, global_hooks, is_trusted, is_trusted_call
from ..program.node import Node, Value
from ..program.program import Input, Program
from ..replay.loss_scale import HELD, Scaling, Unscaled, scale_input, skip_writes_on_overflow, unscale_gradients
from ..replay.recorder import Recorder
from ..torch_hooks import decided_outside
from .known_steps import KNOWN_STEPS, can_be_known, step_key, with_own_constants
from .optimizer_copy import StateKey, optimizer_copy, run_step
from .optimizer_states import add_state_input, is_number
from .parameter_redirection import redirect_parameters
from .step_effects import forbid_side_effects

STEP, END = 1, 3


@dataclass(frozen=True, slots=True)
class Recorded:
    """The recorded update of some parameters, and the part of the update that produces each value.

    The parts are: before the step, the step, the gathers after it, and the end.
    """

    program: Program
    parts: Mapping[Value, int]

    def part(self, node: Node) -> int:
        """Return the part that a node is in."""
        return self.parts.get(node.outs[0], END)


@dataclass(frozen=True, slots=True)
class _FakeStep:
    """The fake tensors of a recorded step, by parameter name, and the twin optimizer that runs the step."""

    wholes: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    """The shards that this rank updates."""
    states: Mapping[StateKey, Any]
    unscaled: Unscaled | None
    twin: Optimizer


@dataclass(frozen=True)
class OptimizerStep:
    """The step of an optimizer, which `recorded` records."""

    optimizer: Optimizer
    names: Mapping[int, str]
    rank: int
    size: int
    shards: Mapping[str, Spec]
    scaling: Scaling | None

    @cached_property
    def held(self) -> Mapping[str, tuple[int, Tensor]]:
        """The parameters of the optimizer by name, each with the number of its group."""
        groups = enumerate(self.optimizer.param_groups)
        return {self.names.get(id(p), ""): (at, p) for at, group in groups for p in group["params"]}

    @cached_property
    def is_users(self) -> bool:
        """True if the step runs user code."""
        return runs_users_code(self.optimizer)

    def is_moved(self, given: Input) -> bool:
        """True if the program takes the parameter in another layout than its current one; its states move with it."""
        return given.name in self.held and getattr(self.held[given.name][1], "_spec", None) is not given.spec

    def recorded(self, trained: Sequence[Input], states: Mapping[StateKey, Any]) -> Recorded:
        """Return the update of the parameters `trained`, recorded now or for another model."""
        key = None if self.is_users else step_key(self.optimizer, self.names, trained, states)
        if key is None:
            return self._recorded_now(trained, states)
        layouts = [(self.shards.get(i.name), self.is_moved(i)) for i in trained]
        key = key, self.rank, self.size, tuple(layouts), self.scaling
        found: Recorded | None = KNOWN_STEPS.get(key)
        if found is None:
            found = self._recorded_now(trained, states)
            if not can_be_known(found.program):
                return found
            KNOWN_STEPS[key] = found
        return replace(found, program=with_own_constants(found.program))

    def _recorded_now(self, trained: Sequence[Input], states: Mapping[StateKey, Any]) -> Recorded:
        """Record the update of the parameters `trained`."""
        recorder = Recorder(self.rank, self.size)
        recorder.recording.forgets = True
        with recorder.recording_as("update"), torch.no_grad():
            fake = self._fake_step(recorder, trained, states)
            ends = [len(recorder.recording.nodes)]
            self._run_twin(fake)
            ends.append(len(recorder.recording.nodes))
            for name in (n for n in fake.parameters if n in self.shards):
                fake.wholes[name].copy_(fake.parameters[name])
            if fake.unscaled is not None and self.scaling is not None:
                fake.unscaled.renew(self.scaling)
        nodes = list(enumerate(recorder.recording.nodes))
        parts = {v: bisect_right(ends, at) for at, node in nodes for v in node.outs}
        return Recorded(_finished(recorder, fake), parts)

    def _fake_step(self, recorder: Recorder, trained: Sequence[Input], states: Mapping[StateKey, Any]) -> _FakeStep:
        """Return fake parameters with gradients and states, which are inputs of the program."""
        pieces = {i.name: replace(i, spec=self.shards.get(i.name, i.spec)) for i in trained}
        wholes = {i.name: recorder.add(i) for i in trained}
        grads = {i.name: recorder.add(_gradient(i)) for i in trained}
        parameters = {name: _shard_of(x, pieces[name].spec) for name, x in wholes.items()}
        unscaled = None if self.scaling is None else _unscaled(recorder, grads, pieces)
        for name, x in parameters.items():
            x.grad = (grads if unscaled is None else unscaled.grads)[name]
        moved = {i.name for i in trained if self.is_moved(i)}
        fake_states = _fake_states(recorder, pieces, moved, states)
        held = {**self._untrained(recorder, parameters), **parameters}
        twin = optimizer_copy(self.optimizer, self.names, held, fake_states, recorder)
        return _FakeStep(wholes, parameters, fake_states, unscaled, twin)

    def _untrained(self, recorder: Recorder, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return fake tensors for parameters without a gradient, because user code may count parameters."""
        if not self.is_users:
            return {}
        return {name: recorder.unknown(p) for name, (_, p) in self.held.items() if name and name not in trained}

    def _run_twin(self, fake: _FakeStep) -> None:
        """Run the step of the twin."""
        pairs = [(self.held[name][1], x) for name, x in fake.parameters.items() if name in self.held]
        for real, x in pairs:
            _share_attributes(real, x)
        checked = forbid_side_effects(self.optimizer, fake.twin) if self.is_users else nullcontext()
        with redirect_parameters(pairs), checked:
            run_step(fake.twin)


def runs_users_code(optimizer: Optimizer) -> bool:
    """True if a step of the optimizer runs untrusted code: a method of a user's class, or a hook."""
    tables = (*(getattr(optimizer, table) for table in STEP_HOOKS), *global_hooks())
    hooks = (hook for table in tables for hook in table.values())
    return not all(map(is_trusted_call, hooks)) or not all(map(is_trusted, type(optimizer).__mro__))


def _share_attributes(real: Tensor, fake: Tensor) -> None:
    """Copy the attributes that the user set on a parameter to its fake parameter."""
    for key in vars(real).keys() - vars(fake).keys() - OWN:
        setattr(fake, key, vars(real)[key])


def _fake_states(
    recorder: Recorder, parameters: Mapping[str, Input], moved: Collection[str], states: Mapping[StateKey, Any]
) -> dict[StateKey, Any]:
    """Return the fake states of the parameters, which are inputs of the program; those in `moved` change layout."""
    return {
        (name, key): add_state_input(recorder, (name, key), value, parameters[name], name in moved)
        for (name, key), value in states.items()
        if name in parameters
    }


def _gradient(parameter: Input) -> Input:
    v, spec = parameter.value, parameter.spec
    value = replace(v, name=f"{v.name}_grad")
    return Input(value, "gradient", parameter.name, None if spec is None else spec.dual())


def _unscaled(recorder: Recorder, grads: Mapping[str, Tensor], pieces: Mapping[str, Input]) -> Unscaled:
    device = next(iter(grads.values())).device
    scale, count = (recorder.add(scale_input(key, device)) for key in HELD)
    return unscale_gradients(grads, {name: i.spec for name, i in pieces.items()}, scale, count)


def _shard_of(x: Tensor, spec: Spec | None) -> Tensor:
    """Return the shard of a parameter that this rank updates, as a parameter of its own."""
    if not isinstance(x, DistTensor) or spec is None or spec is x.spec:
        return x
    out = redistribute(x, spec.mesh, spec.layout)
    out._is_param = True
    return out


def _states_of(fake: _FakeStep) -> dict[StateKey, Any]:
    """Return the states after the step. Raises CaptureError for a state whose key is no parameter."""
    known = {x: name for name, x in fake.parameters.items()}
    other = next((key for key in fake.twin.state if key not in known), None)
    if other is not None:
        raise CaptureError(
            "recording the optimizer's step",
            f"a state of {other!r:.60}",
            "a program has only the states of the parameters that it trains",
            "use a state of a parameter, self.state[p][...], or a tensor in the group's options",
        )
    return {(known[p], key): v for p, state in fake.twin.state.items() for key, v in state.items()}


def _finished(recorder: Recorder, fake: _FakeStep) -> Program:
    """Return the program. It writes existing state tensors back; new states and changed numbers are its outputs.

    Raises CaptureError for a step that writes to no parameter.
    """
    before, after, unscaled = fake.states, _states_of(fake), fake.unscaled
    _check_path(recorder)
    _check_parameters_written(recorder, fake)
    made = {key: v for key, v in after.items() if key not in before or (is_number(v) and v is not before[key])}
    kept = {key: v for key, v in after.items() if key in before and isinstance(v, Tensor)}
    writes = [(before[key], v) for key, v in kept.items() if v is not before[key]]
    if unscaled is None:
        return recorder.finish({"state": made}, writes)
    program = recorder.finish({"state": made, "skipped": unscaled.found}, writes)
    renewed = [recorder.recording.input_of(x) for x in (unscaled.scale, unscaled.count)]
    return skip_writes_on_overflow(program, program.outputs["skipped"], renewed)


def _check_parameters_written(recorder: Recorder, fake: _FakeStep) -> None:
    """Raise CaptureError for a step that writes to no parameter, on a rank with gradients for the optimizer.

    A stage of a pipeline may have none of the optimizer's parameters.
    """
    inputs, written = recorder.recording.inputs, dict(recorder.recording.written())
    if _has_gradients(recorder, fake) and not any(x.role == "parameter" and x.value in written for x in inputs):
        raise CaptureError(
            "recording the optimizer's step",
            "a step that writes to no parameter",
            "the step must update the parameters of the optimizer",
            "write a step that updates the parameters in self.param_groups",
        )


def _has_gradients(recorder: Recorder, fake: _FakeStep) -> bool:
    """True if this rank has a part of a gradient that the optimizer reads."""
    updated = {id(x) for group in fake.twin.param_groups for x in group["params"]}
    names = {name for name, p in fake.parameters.items() if id(p) in updated}
    gradients = [x for x in recorder.recording.inputs if x.role == "gradient" and x.name in names]
    return any(x.spec is None or recorder.communicator.rank in x.spec.mesh for x in gradients)


def _check_path(recorder: Recorder) -> None:
    """Raise CaptureError if Python code branched on a number that may change in the next step."""
    numbers = recorder.scalars()
    found = next((g for g in decided_outside(recorder.mode) if g.free_symbols & numbers), None)
    if found is not None:
        raise CaptureError(
            "recording the optimizer's step",
            f"the step branches on {found}, for a learning rate or its own counters",
            "a program is recorded once, with the branch that was taken then",
            "use torch.where, or a counter that is a tensor",
        )
