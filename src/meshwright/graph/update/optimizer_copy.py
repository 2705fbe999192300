"""Copy of an optimizer that runs its step on fake parameters and states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import reduce
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshwright.layout import MeshwrightError, TorchValue

from .._errors import CaptureError
from ..program.node import Value
from ..program.program import Input
from ..replay.recorder import Recorder
from ..torch_hooks import DataDependent

StateKey = tuple[str, str]
"""Name of the parameter, and key of the state."""


def run_step(twin: Optimizer) -> None:
    """Run the step. Raises CaptureError for a step that needs elements of tensors, or missing arguments."""
    try:
        with symbolic_extrema(type(twin)):
            twin.step()
    except MeshwrightError:
        raise
    except (*DataDependent, TypeError, LookupError, AttributeError) as error:
        raise CaptureError(
            f"recording a step of {type(twin).__name__}",
            _explained(error),
            "the step or one of its hooks needs numbers of tensors in Python, or arguments that a program lacks",
            "use another optimizer, or capturable=True on a GPU; in a hook, write torch.where(condition, a, b) instead "
            "of `if`",
        ) from error


def _explained(error: BaseException) -> str:
    """Return the first line of an error, with an explanation or the error's type if needed."""
    text = str(error).split("\n")[0]
    if isinstance(error, DataDependent):
        return f"a decision in Python that depends on a number in a tensor: {text}"
    return text if isinstance(error, (*DataDependent, TypeError)) else f"{type(error).__name__}: {text}"


def optimizer_copy(
    optimizer: Optimizer,
    names: Mapping[int, str],
    parameters: Mapping[str, Tensor],
    states: Mapping[StateKey, Any],
    recorder: Recorder,
) -> Optimizer:
    """Return a copy of `optimizer` with fake parameters and states; learning rates are inputs of the program."""
    twin = object.__new__(type(optimizer))  # copy.copy omits attributes and hooks that __getstate__ omits
    twin.__dict__ |= optimizer.__dict__
    check_step(twin.__dict__.pop("step", None))
    twin.param_groups = [
        _copied_group(group, at, names, parameters, recorder) for at, group in enumerate(optimizer.param_groups)
    ]
    twin.state = defaultdict(dict)
    for (name, key), value in states.items():
        if name in parameters:
            twin.state[parameters[name]][key] = value
    return twin


def check_step(step: object) -> None:
    """Raise CaptureError for a `step` set on the optimizer object, unless a learning rate scheduler set it."""
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise CaptureError(
            "recording the optimizer's step",
            f"a step that was set on the object: {step!r}",
            "this step is bound to the optimizer itself, and would update real parameters during the recording",
            "define the step in a subclass, or use optimizer.register_step_pre_hook(fn)",
        )


def _copied_group(
    group: dict[str, Any], at: int, names: Mapping[int, str], parameters: Mapping[str, Tensor], recorder: Recorder
) -> dict[str, Any]:
    kept = [p for p in group["params"] if _name_of(p, names) in parameters]
    one_by_one = {key: False for key in ("foreach", "fused") if key in group}
    tensors = {key: _tensor_option(recorder, f"{key}_{at}", x) for key, x in group.items() if isinstance(x, Tensor)}
    rate = group.get("lr")
    lr = {"lr": recorder.add_number(f"lr_{at}", float(rate), at)} if isinstance(rate, (int, float)) else {}
    return {**group, **one_by_one, **tensors, **lr, "params": [parameters[names[id(p)]] for p in kept]}


def _tensor_option(recorder: Recorder, name: str, x: Tensor) -> Tensor:
    """Add a tensor option of the optimizer as an input, so that each step uses its current value."""
    return recorder.add(Input(Value.of(name, x), "constant", name, None, x))


@contextmanager
def symbolic_extrema(kind: type[Any]) -> Generator[None]:
    """Let `min` and `max` in the file that defines `kind` accept symbolic numbers, without guards."""
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
    def call(*numbers: TorchValue, **options: TorchValue) -> TorchValue:
        if options or len(numbers) < 2 or not any(isinstance(n, torch.SymFloat) for n in numbers):
            return plain(*numbers, **options)
        return reduce(symbolic, numbers)

    return call


_EXTREMA = {"min": _extremum(min, torch.sym_min), "max": _extremum(max, torch.sym_max)}


def _name_of(parameter: Tensor, names: Mapping[int, str]) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise CaptureError(
            "recording the optimizer's step",
            f"a parameter of shape {tuple(parameter.shape)} that the model lacks",
            "a program updates the parameters of the model that it runs",
            "create the optimizer after the marks: optimizer(model.parameters())",
        )
    return name
