"""Recording an optimizer's own `step`: a copy of it works on fake parameters, gradients and states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.layout import MeshwrightError, Spec
from meshwright.tensor import DistTensor, redistribute

from ._errors import CaptureError
from ._loss_scale import HELD, Scaling, Unscaled, kept_where, scale_input, unscaled
from ._node import Value
from ._program import Input, Program
from ._record import Recorder
from ._standing import standing_for
from .guards import STEP_HOOKS, global_hooks, is_trusted, is_trusted_call
from .torch_hooks import DataDependent, decided_outside

StateKey = tuple[str, str]
"""Name of the parameter, key of the state."""


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
    """The program of one `optimizer.step()` on the parameters `trained`, which have gradients.

    Of a parameter in `shards` each rank updates the part that the spec says, and the parts are gathered.

    Inputs are parameters, gradients (role "gradient", by the parameter's name), `states` by "parameter.key", and
    learning rates. The output is `{"state": {(parameter, key): value}}`, the states that the step makes.

    With `scaling` gradients are those of a scaled loss; the output "skipped" tells that one of them is not finite: then
    parameters and states stay what they are, and states that the step makes are to be thrown away.
    """
    recorder = Recorder(rank, size)
    pieces = {i.name: replace(i, spec=(shards or {}).get(i.name, i.spec)) for i in trained}
    with recorder.recording_as("update"), torch.no_grad():
        wholes = {i.name: recorder.add(i) for i in trained}
        grads = {i.name: recorder.add(_gradient(i)) for i in trained}
        parameters = {name: _piece(x, pieces[name].spec) for name, x in wholes.items()}
        plain = None if scaling is None else _unscaled(recorder, grads, pieces)
        for name, x in parameters.items():
            x.grad = grads[name] if plain is None else plain.grads[name]
        moved = _moved(optimizer, names, trained)
        given: dict[StateKey, Any] = {
            key: _stand_in(recorder, key, value, pieces.get(key[0]), key[0] in moved) for key, value in states.items()
        }
        twin = _twin_of(optimizer, names, parameters, given, recorder)
        real = {names.get(id(p)): p for group in optimizer.param_groups for p in group["params"]}
        with standing_for((real[name], x) for name, x in parameters.items() if name in real):
            _stepped(twin)
        for name in shards or {}:
            wholes[name].copy_(parameters[name])
        if plain is not None and scaling is not None:
            plain.renew(scaling)
    known = {x: name for name, x in parameters.items()}
    after = {(known[p], key): v for p, state in twin.state.items() for key, v in state.items()}
    return _finished(recorder, given, after, plain)


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


def _stepped(twin: Optimizer) -> None:
    try:
        with symbolic_extrema(type(twin)):
            twin.step()
    except MeshwrightError:
        raise
    except (*DataDependent, TypeError) as error:
        raise CaptureError(
            f"to record a step of {type(twin).__name__}", str(error).split("\n")[0],
            "its step needs numbers of tensors in Python, or arguments that a program does not have",
            "another optimizer, or this one's capturable=True",
        ) from error  # fmt: skip


def lies_as(state: Tensor, parameter: Input | None) -> Spec | None:
    """How a state that is whole is to lie: as its parameter, where it has the parameter's shape."""
    spec = None if parameter is None else parameter.spec
    fits = spec is not None and tuple(spec.shape) == tuple(state.shape) and state.dim() > 0
    return spec.with_dtype(state.dtype) if spec is not None and fits else None


def _gradient(parameter: Input) -> Input:
    v, spec = parameter.value, parameter.spec
    value = Value(f"{v.name}_grad", v.shape, v.dtype, v.device)
    return Input(value, "gradient", parameter.name, None if spec is None else spec.dual())


def _moved(optimizer: Optimizer, names: Mapping[int, str], trained: Sequence[Input]) -> set[str]:
    """The parameters that lie otherwise by now than the program takes them; their states will go with them."""
    lie = {names.get(id(p)): getattr(p, "_spec", None) for group in optimizer.param_groups for p in group["params"]}
    return {i.name for i in trained if lie.get(i.name) is not i.spec}


def _stand_in(recorder: Recorder, key: StateKey, value: Any, parameter: Input | None, moved: bool) -> Any:
    if _is_number(value):
        return recorder.add_number(".".join(key), value, key)
    if not isinstance(value, Tensor):
        return value
    spec = value.spec if isinstance(value, DistTensor) and not moved else lies_as(value, parameter)
    name = ".".join(key)
    return recorder.add(
        Input(Value(name, tuple(value.shape), value.dtype, str(value.device)), "state", name, spec, key)
    )


def _twin_of(
    optimizer: Optimizer,
    names: Mapping[int, str],
    parameters: Mapping[str, Tensor],
    states: Mapping[StateKey, Any],
    recorder: Recorder,
) -> Optimizer:
    """A copy of `optimizer` that works on fake parameters and states; learning rates are inputs of the program."""
    twin = object.__new__(type(optimizer))  # copy.copy leaves out what __getstate__ does not name: hooks, attributes
    twin.__dict__ |= optimizer.__dict__
    _check_step(twin.__dict__.pop("step", None))
    twin.param_groups = [
        _group(group, at, names, parameters, recorder) for at, group in enumerate(optimizer.param_groups)
    ]
    twin.state = defaultdict(dict)
    for (name, key), value in states.items():
        if name in parameters:
            twin.state[parameters[name]][key] = value
    return twin


def _check_step(own: Any) -> None:
    """A schedule of learning rates puts a step of its own on the optimizer, to count; nothing else may."""
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise CaptureError(
            "to record the optimizer's step", f"a step of its own on the object: {own!r}",
            "it is bound to the optimizer itself, and would step real parameters while fake ones are recorded",
            "a subclass with this step, or optimizer.register_step_pre_hook(fn)",
        )  # fmt: skip


def _group(
    group: dict[str, Any], at: int, names: Mapping[int, str], parameters: Mapping[str, Tensor], recorder: Recorder
) -> dict[str, Any]:
    kept = [p for p in group["params"] if _name(p, names) in parameters]
    one_by_one = {key: False for key in ("foreach", "fused") if key in group}
    tensors = {key: _option(recorder, f"{key}_{at}", x) for key, x in group.items() if isinstance(x, Tensor)}
    lr = {} if "lr" in tensors else {"lr": recorder.add_number(f"lr_{at}", float(group["lr"]), at)}
    return {**group, **one_by_one, **tensors, **lr, "params": [parameters[names[id(p)]] for p in kept]}


def _option(recorder: Recorder, name: str, x: Tensor) -> Tensor:
    """A tensor among the optimizer's options: what it holds by then counts."""
    value = Value(name, tuple(x.shape), x.dtype, str(x.device))
    return recorder.add(Input(value, "constant", name, None, x))


@contextmanager
def symbolic_extrema(kind: type[Any]) -> Generator[None]:
    """Inside, `min` and `max` in the file that defines `kind` take symbolic numbers, without asking which is larger."""
    names: dict[str, Any] = unwrap(kind.step).__globals__
    before = {name: names[name] for name in _EXTREMA if name in names}
    names.update(_EXTREMA)
    try:
        yield
    finally:
        for name in _EXTREMA:
            del names[name]
        names.update(before)


def _extremum(plain: Callable[..., Any], symbolic: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def call(*numbers: Any, **how: Any) -> Any:
        if how or len(numbers) < 2 or not any(isinstance(n, torch.SymFloat) for n in numbers):
            return plain(*numbers, **how)
        return reduce(symbolic, numbers)

    return call


_EXTREMA = {"min": _extremum(min, torch.sym_min), "max": _extremum(max, torch.sym_max)}


def _name(parameter: Tensor, names: Mapping[int, str]) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise CaptureError(
            "to record the optimizer's step", f"a parameter of shape {tuple(parameter.shape)} that the model lacks",
            "a program updates the parameters of the model that it runs",
            "the optimizer made after the marks: optimizer(model.parameters())",
        )  # fmt: skip
    return name
