"""Recording an optimizer's own `step`: a copy of it works on fake parameters, gradients and states."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.layout import Spec
from meshwright.tensor import DistTensor, redistribute

from ._errors import CaptureError
from ._first_states import made_states, with_first_states
from ._loss_scale import HELD, Scaling, Unscaled, kept_where, scale_input, unscaled
from ._node import Value
from ._program import Input, Program
from ._record import Recorder
from ._repeat import Recorded, repeated
from ._standing import standing_for
from ._step_effects import refuse_wrapper, refusing_effects
from ._twin import StateKey, stepped, twin_of
from .guards import OWN, STEP_HOOKS, global_hooks, is_trusted, is_trusted_call
from .torch_hooks import decided_outside


def record_update(
    optimizer: Optimizer,
    names: Mapping[int, str],
    trained: Sequence[Input],
    states: Mapping[StateKey, Any],
    rank: int,
    size: int,
    shards: Mapping[str, Spec] | None = None,
    scaling: Scaling | None = None,
) -> Program:
    """Return the program of one `optimizer.step()` on the parameters `trained`, which have gradients.

    Of a parameter in `shards` each rank updates the part that the spec says, and the parts are gathered.

    Inputs are parameters, gradients (role "gradient", by the parameter's name), `states` by "parameter.key", and
    learning rates. The output is `{"state": {(parameter, key): value}}`, the states that the step makes. States that
    can be made before the first step are inputs, which tell their first number.

    With `scaling` gradients are those of a scaled loss; the output "skipped" tells that one of them is not finite: then
    parameters and states stay what they are, and states that the step makes are to be thrown away.
    """
    update = _Update(optimizer, names, tuple(trained), rank, size, shards or {}, scaling)
    if runs_users_code(optimizer):
        refuse_wrapper(optimizer)
        return update.recorded(trained, states).program
    first = update.repeated(states)
    made = made_states(first)
    if not made or len(made) != len(first.outputs["state"]):
        return first
    return with_first_states(first, update.repeated({**states, **made})) or first


@dataclass(frozen=True)
class _Update:
    """The step of an optimizer that is to be recorded."""

    optimizer: Optimizer
    names: Mapping[int, str]
    trained: tuple[Input, ...]
    rank: int
    size: int
    shards: Mapping[str, Spec]
    scaling: Scaling | None

    def repeated(self, states: Mapping[StateKey, Any]) -> Program:
        """Return the update of all parameters, of which two of each kind are recorded if the others are like them."""
        kinds: dict[Any, list[str]] = {}
        forms: dict[str, list[Any]] = {}
        for (name, key), value in states.items():
            forms.setdefault(name, []).append((key, _form(value)))
        for i in self.trained:
            kinds.setdefault((self._kind(i), *forms.get(i.name, ())), []).append(i.name)
        models = {name: kind[min(at, 1)] for kind in kinds.values() for at, name in enumerate(kind)}
        chosen = {*models.values()}
        if self.scaling is None and len(chosen) < len(self.trained):
            found = self.recorded([i for i in self.trained if i.name in chosen], states)
            whole = repeated(found, models, self.trained, self._stepped())
            if whole is not None:
                return whole
        return self.recorded(self.trained, states).program

    def _stepped(self) -> list[str]:
        """Return the trained parameters in the order of their updates."""
        trained = {i.name for i in self.trained}
        return [name for name in self.held if name in trained]

    @cached_property
    def held(self) -> Mapping[str, tuple[int, Tensor]]:
        """The parameters of the optimizer by name, each with the number of its group."""
        groups = enumerate(self.optimizer.param_groups)
        return {self.names.get(id(p), ""): (at, p) for at, group in groups for p in group["params"]}

    def _kind(self, given: Input) -> Any:
        """Return what two parameters share whose updates are alike, beside the forms of their states."""
        group = self.held[given.name][0] if given.name in self.held else None
        v, spec = given.value, given.spec
        return group, spec, self.shards.get(given.name), v.shape, v.dtype, v.device, self._is_moved(given)

    def _is_moved(self, given: Input) -> bool:
        """True if the parameter lies otherwise by now than the program takes it; its states will go with it."""
        return given.name in self.held and getattr(self.held[given.name][1], "_spec", None) is not given.spec

    def _idle(self, recorder: Recorder) -> dict[str, Tensor]:
        """Return a stand-in for each parameter without a gradient; code of the user may count parameters."""
        trained = {i.name for i in self.trained}
        if not runs_users_code(self.optimizer):
            return {}
        return {name: recorder.unknown(p) for name, (_, p) in self.held.items() if name and name not in trained}

    def recorded(self, trained: Sequence[Input], states: Mapping[StateKey, Any]) -> Recorded:
        """Record the update of some of the parameters."""
        optimizer, names = self.optimizer, self.names
        recorder = Recorder(self.rank, self.size)
        recorder.recording.forgets = True
        pieces = {i.name: replace(i, spec=self.shards.get(i.name, i.spec)) for i in trained}
        ends: list[int] = []
        with recorder.recording_as("update"), torch.no_grad():
            wholes = {i.name: recorder.add(i) for i in trained}
            grads = {i.name: recorder.add(_gradient(i)) for i in trained}
            parameters = {name: _piece(x, pieces[name].spec) for name, x in wholes.items()}
            plain = None if self.scaling is None else _unscaled(recorder, grads, pieces)
            for name, x in parameters.items():
                x.grad = grads[name] if plain is None else plain.grads[name]
            moved = {i.name for i in trained if self._is_moved(i)}
            given: dict[StateKey, Any] = {
                key: _stand_in(recorder, key, value, pieces[key[0]], key[0] in moved)
                for key, value in states.items()
                if key[0] in pieces
            }
            twin = twin_of(optimizer, names, {**self._idle(recorder), **parameters}, given, recorder)
            for name in parameters.keys() & self.held.keys():
                _share_attributes(self.held[name][1], parameters[name])
            ends.append(len(recorder.recording.nodes))
            with standing_for((self.held[name][1], x) for name, x in parameters.items() if name in self.held):
                with refusing_effects(optimizer, twin) if runs_users_code(optimizer) else nullcontext():
                    stepped(twin)
            ends.append(len(recorder.recording.nodes))
            for name in (n for n in parameters if n in self.shards):
                wholes[name].copy_(parameters[name])
            if plain is not None and self.scaling is not None:
                plain.renew(self.scaling)
        ends.append(len(recorder.recording.nodes))
        parts = {v: bisect_right(ends, at) for at, node in enumerate(recorder.recording.nodes) for v in node.outs}
        known = {x: name for name, x in parameters.items()}
        _check_owners(twin, known)
        after = {(known[p], key): v for p, state in twin.state.items() for key, v in state.items()}
        program = _finished(recorder, given, after, plain)
        return Recorded(program, {v: part for v, part in parts.items() if part < len(ends)})


def _share_attributes(real: Tensor, fake: Tensor) -> None:
    """Give a stand-in the attributes that the user set on a parameter."""
    for key in vars(real).keys() - vars(fake).keys() - OWN:
        setattr(fake, key, vars(real)[key])


def _check_owners(twin: Optimizer, known: Mapping[Tensor, str]) -> None:
    """Raise CaptureError for a state of something that is no parameter."""
    other: Any = next((key for key in twin.state if key not in known), None)
    if other is not None:
        raise CaptureError(
            "to record the optimizer's step", f"a state of {other!r:.60}",
            "a program reads and writes states of the parameters that it trains",
            "a state of a parameter, self.state[p][...], or a tensor among the group's options",
        )  # fmt: skip


def _form(state: Any) -> Any:
    """Return what two states share that are recorded alike."""
    if isinstance(state, Input):
        return state.value.shape, state.value.dtype, state.value.device, state.spec
    if isinstance(state, Tensor):
        return tuple(state.shape), state.dtype, str(state.device), getattr(state, "_spec", None)
    return (type(state), state > 0) if _is_number(state) else id(state)


def runs_users_code(optimizer: Optimizer) -> bool:
    """True if a step of the optimizer runs code that is not torch's: a method of its own, or a hook."""
    tables = (*(getattr(optimizer, table) for table in STEP_HOOKS), *global_hooks())
    hooks = (hook for table in tables for hook in table.values())
    return not all(map(is_trusted_call, hooks)) or not all(map(is_trusted, type(optimizer).__mro__))


def _unscaled(recorder: Recorder, grads: Mapping[str, Tensor], pieces: Mapping[str, Input]) -> Unscaled:
    device = next(iter(grads.values())).device
    scale, count = (recorder.add(scale_input(key, device)) for key in HELD)
    return unscaled(grads, {name: i.spec for name, i in pieces.items()}, scale, count)


def _piece(x: Tensor, spec: Spec | None) -> Tensor:
    """The part of a parameter that is updated here, as a parameter of its own."""
    if not isinstance(x, DistTensor) or spec is None or spec is x.spec:
        return x
    out = redistribute(x, spec.mesh, spec.layout)
    out._is_param = True
    return out


def _finished(
    recorder: Recorder, given: Mapping[StateKey, Any], after: Mapping[StateKey, Any], plain: Unscaled | None
) -> Program:
    """States that are tensors are written back; those that are new, or Python numbers, are given out."""
    _check_path(recorder)
    written = {value for value, _ in recorder.recording.written()}
    wrote = {x.role for x in recorder.recording.inputs if x.value in written}
    here = [x for x in recorder.recording.inputs if x.spec is None or recorder.carrier.rank in x.spec.mesh]
    if "parameter" not in wrote and any(x.role == "gradient" for x in here):
        raise CaptureError(
            "to record the optimizer's step", "a step that writes to no parameter",
            "what it does is done to other tensors than the parameters that it was given",
            "a step that works on self.param_groups",
        )  # fmt: skip
    made = {key: v for key, v in after.items() if key not in given or (_is_number(v) and v is not given[key])}
    writes = [(given[key], v) for key, v in after.items() if isinstance(v, Tensor) and key in given]
    writes = [(x, v) for x, v in writes if x is not v]
    if plain is None:
        return recorder.finish({"state": made}, writes)
    program = recorder.finish({"state": made, "skipped": plain.found}, writes)
    renewed = [recorder.recording.input_of(x) for x in (plain.scale, plain.count)]
    return kept_where(program, program.outputs["skipped"], renewed)


def _check_path(recorder: Recorder) -> None:
    """Raises CaptureError where Python decided by a number that may be another one next time."""
    numbers = recorder.scalars()
    found = next((g for g in decided_outside(recorder.mode) if g.free_symbols & numbers), None)
    if found is not None:
        raise CaptureError(
            "to record the optimizer's step", f"it asked whether {found} of a learning rate or of its own counters",
            "a program is recorded once: it would go the same way when the answer is another one",
            "torch.where, or a counter that is a tensor",
        )  # fmt: skip


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(x, bool)


def lies_as(state: Tensor, parameter: Input | None) -> Spec | None:
    """How a state that is whole is to lie: as its parameter, where it has the parameter's shape."""
    spec = None if parameter is None else parameter.spec
    fits = spec is not None and tuple(spec.shape) == tuple(state.shape) and state.dim() > 0
    return spec.with_dtype(state.dtype) if spec is not None and fits else None


def _gradient(parameter: Input) -> Input:
    v, spec = parameter.value, parameter.spec
    value = Value(f"{v.name}_grad", v.shape, v.dtype, v.device)
    return Input(value, "gradient", parameter.name, None if spec is None else spec.dual())


def _stand_in(recorder: Recorder, key: StateKey, value: Any, parameter: Input | None, moved: bool) -> Any:
    if isinstance(value, Input):
        return recorder.add(value)
    if _is_number(value):
        return recorder.add_number(".".join(key), value, key)
    if not isinstance(value, Tensor):
        return value
    spec = value.spec if isinstance(value, DistTensor) and not moved else lies_as(value, parameter)
    name = ".".join(key)
    return recorder.add(
        Input(Value(name, tuple(value.shape), value.dtype, str(value.device)), "state", name, spec, key)
    )
