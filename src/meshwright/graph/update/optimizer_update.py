"""Recording of an optimizer's update of all parameters; if possible, only a few parameters are recorded."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from meshwright.layout import Spec

from ..program.program import Input, Program
from ..replay.loss_scale import Scaling
from .first_states import made_states, with_first_states
from .optimizer_copy import StateKey
from .optimizer_states import state_kind
from .recorded_step import OptimizerStep
from .repeated_update import repeated
from .step_effects import refuse_wrapper


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

    For a parameter in `shards`, each rank updates the shard of this spec, and the shards are gathered.

    Inputs are parameters, gradients (role "gradient", by the parameter's name), `states` by "parameter.key", and
    learning rates. The output is `{"state": {(parameter, key): value}}`, the states that the step creates. States that
    can be created before the first step are inputs with a first number.

    With `scaling`, gradients are those of a scaled loss. The output "skipped" is True if a gradient is not finite. Then
    parameters and states are unchanged, and the caller must discard states that the step created.

    Raises:
        CaptureError: the step cannot be recorded, or the optimizer wraps another one.
        SideEffectError: the step runs user code that changes anything but tensors.
    """
    step = OptimizerStep(optimizer, names, rank, size, shards or {}, scaling)
    if step.is_users:
        refuse_wrapper(optimizer)
        return step.recorded(trained, states).program
    first = _recorded_by_kind(step, trained, states)
    made = made_states(first)
    if not made or len(made) != len(first.outputs["state"]):
        return first
    return with_first_states(first, _recorded_by_kind(step, trained, {**states, **made})) or first


def _recorded_by_kind(step: OptimizerStep, trained: Sequence[Input], states: Mapping[StateKey, Any]) -> Program:
    """Return the update of all parameters. Two of each kind are recorded, or all if they cannot be repeated."""
    templates = _templates(step, trained, states)
    chosen = [i for i in trained if i.name in {*templates.values()}]
    if step.scaling is None and len(chosen) < len(trained):
        names = {i.name for i in trained}
        order = [name for name in step.held if name in names]
        whole = repeated(step.recorded(chosen, states), templates, trained, order)
        if whole is not None:
            return whole
    return step.recorded(trained, states).program


def _templates(step: OptimizerStep, trained: Sequence[Input], states: Mapping[StateKey, Any]) -> dict[str, str]:
    """Return, for each parameter, the parameter that is recorded for it: one of the first two of its kind."""
    forms: dict[str, list[Any]] = {}
    for (name, key), value in states.items():
        forms.setdefault(name, []).append((key, state_kind(value)))
    kinds: dict[Any, list[str]] = {}
    for i in trained:
        kinds.setdefault((_kind(step, i), *forms.get(i.name, ())), []).append(i.name)
    return {name: kind[min(at, 1)] for kind in kinds.values() for at, name in enumerate(kind)}


def _kind(step: OptimizerStep, given: Input) -> Hashable:
    """Return a key that is equal for parameters with equal updates, apart from the kinds of their states."""
    group = step.held[given.name][0] if given.name in step.held else None
    v, spec = given.value, given.spec
    return group, spec, step.shards.get(given.name), v.shape, v.dtype, v.device, step.is_moved(given)
