"""Save and resume a training run: model, optimizer, learning rates, place in the data, random states, step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint import (
    Catalogue,
    CheckpointError,
    HeldTensor,
    LoadReport,
    Saving,
    TensorEntry,
    current_world,
    format_of,
    is_step,
    load,
    open_together,
    save,
    step_name,
)
from meshwright.layout import Spec
from meshwright.tensor import DistTensor, absent, as_part, local_parts

from ..eager.optimizer import distribute_states
from ..recording.loss_scale import LossScale
from ..static.to_static import DistModel
from .random_states import NAME as RANDOM
from .random_states import check_random, place_for_random, put_back_random, random_of
from .restored_objects import ExtraStates, Options, Restored, Stateful
from .state_checkpoint import Where, held

Model = nn.Module | DistModel
States = list[tuple[str, Tensor, dict[str, Tensor]]]
"""For each parameter its name, the parameter, and its states by key."""
MODEL, STATE, GROUPS, SCALE = "model.", "optimizer.state.", "optimizer.groups", "loss_scale"
KIND = "optimizer.kind"
_COUNTERS = frozenset({"mu_product", "step"})
"""States of one number that optimizers of torch keep on the CPU, unless an option moves them to the device."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The point at which a run resumes: the step that was saved, the value of `data`, and the folder that was read.

    `report` lists the tensors that were not loaded, which `strict=False` allows.
    """

    step: int
    data: Any
    path: Path
    report: LoadReport = field(default_factory=LoadReport)


def save_checkpoint(
    folder: Where,
    step: int,
    model: Model,
    optimizer: Optimizer | None = None,
    scheduler: object = None,
    *,
    data: object = None,
    async_save: bool = False,
    keep: int | None = None,
) -> Saving:
    """Write everything that training needs to resume into the new folder `step_…` of `folder`; every rank calls it.

    This includes parameters, buffers, the optimizer's states and options, the scheduler, the place in the data, the
    states of torch's, Python's and NumPy's generators, and the step. `data` is an object with `state_dict`, or a Python
    value. A static model includes its own optimizer and the scale of its loss. All else is as in `save_state_dict`.
    """
    network, optimizer = _network_and_optimizer(model, optimizer)
    tensors: dict[str, HeldTensor] = {}
    values: dict[str, Any] = {"step": step, "data": _state_of(data), "scheduler": _state_of(scheduler)}
    scale = _scale_of(model)
    values |= {SCALE: scale.state_dict()} if scale is not None else {}
    model_leaves = ((f"{MODEL}{name}", value) for name, value in network.state_dict().items())
    for name, value in (*model_leaves, *_optimizer_leaves(network, optimizer)):
        if isinstance(value, Tensor):
            tensors[name] = held(value)
        else:
            values[name] = value
    tensors |= random_of(current_world())
    saving = save(Path(folder) / step_name(step), tensors, values, format_of("meshwright"), async_save, keep)
    if not async_save:
        saving.wait()
    return saving


def load_checkpoint(
    path: Where,
    model: Model,
    optimizer: Optimizer | None = None,
    scheduler: object = None,
    *,
    data: object = None,
    strict: bool = True,
) -> Resumed:
    """Restore everything that `save_checkpoint` wrote, on any mesh; every rank calls it.

    `path` is the folder of a step, or a folder of steps, of which the latest complete one is read. On the same mesh,
    training continues bit for bit. An object `data` with `load_state_dict` is restored; any other place in the data is
    only returned. Model and optimizer must be those that were saved. The error lists all tensors that are missing,
    unexpected or of another shape or dtype, or names the class of the saved optimizer. With `strict=False`, tensors
    that fit are loaded and `Resumed.report` lists the rest; an optimizer of another class stays as it was.

    Raises:
        CheckpointError: the checkpoint does not fit; nothing has been changed.
    """
    network, optimizer = _network_and_optimizer(model, optimizer)
    catalogue = open_together(path)
    _check_run(catalogue)
    other = _other_optimizer(catalogue, optimizer)
    kept = None if other else optimizer
    tensors = {f"{MODEL}{name}": held(x) for name, x in network.state_dict().items() if isinstance(x, Tensor)}
    same = _are_on_the_same_meshes(catalogue, tensors)
    states = _states_for(catalogue, network, kept)
    tensors |= {f"{STATE}{name}.{key}": held(x) for name, _, found in states for key, x in found.items()}
    random = place_for_random(catalogue, current_world(), same)
    scopes = (MODEL,) if kept is None else (MODEL, STATE)
    restored = Restored(_objects(catalogue, model, network, kept, {"scheduler": scheduler, "data": data}))

    def accept() -> None:
        check_random(random)
        restored.put()

    try:
        report = load(
            catalogue,
            tensors,
            strict=strict,
            others={"optimizer": other} if other else {},
            whole=lambda name: name in catalogue.entries and name.startswith(scopes),
            scratch=random,
            accept=accept,
        )
    except BaseException:
        restored.undo()
        raise
    if kept is not None:
        _put_back(catalogue, kept, states, report.left_out)
    put_back_random(random, current_world(), same)
    return Resumed(catalogue.values["step"], catalogue.values["data"], catalogue.folder, report)


def _objects(
    catalogue: Catalogue, model: Model, network: nn.Module, optimizer: Optimizer | None, given: Mapping[str, Any]
) -> dict[str, tuple[Stateful, Any]]:
    """Return what takes its state back by itself, with the state that was saved."""
    found: dict[str, tuple[Stateful, Any]] = {}
    if extra := {name: v for name, v in catalogue.values.items() if name.startswith(MODEL)}:
        found["extra states"] = ExtraStates(network), {n.removeprefix(MODEL): v for n, v in extra.items()}
    if optimizer is not None:
        found["optimizer"] = Options(optimizer), catalogue.values[GROUPS]
    for name, thing in given.items():
        if hasattr(thing, "load_state_dict"):
            found[name] = thing, catalogue.values[name]
    scale = _scale_of(model)
    if scale is not None and SCALE in catalogue.values:
        found["loss scale"] = scale, catalogue.values[SCALE]
    return found


def _network_and_optimizer(model: Model, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
    return (model.network, optimizer or model.optimizer) if isinstance(model, DistModel) else (model, optimizer)


def _scale_of(model: Model) -> LossScale | None:
    return model.loss_scale if isinstance(model, DistModel) else None


def _state_of(thing: Any) -> Any:
    return thing.state_dict() if hasattr(thing, "state_dict") else thing


def _named(network: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer's parameters with their names in the network, or with "group.index" if they have none."""
    names = {id(p): name for name, p in network.named_parameters()}
    for at, group in enumerate(optimizer.param_groups):
        for n, p in enumerate(group["params"]):
            yield names.get(id(p), f"{at}.{n}"), p


def _optimizer_leaves(network: nn.Module, optimizer: Optimizer | None) -> Iterator[tuple[str, Any]]:
    """Yield the states by parameter and key, and the options by group."""
    if optimizer is None:
        return
    for name, p in _named(network, optimizer):
        for key, value in optimizer.state.get(p, {}).items():
            yield f"{STATE}{name}.{key}", value
    yield GROUPS, Options(optimizer).state_dict()
    yield KIND, type(optimizer).__name__


def _check_run(catalogue: Catalogue) -> None:
    """Raise CheckpointError if `save_checkpoint` did not write the checkpoint, or its folder names another step."""
    if not _is_run(catalogue):
        raise CheckpointError(
            f"resuming from {catalogue.folder}",
            "a checkpoint that lacks the step or other entries of a run",
            "the checkpoint was not written by mw.save_checkpoint",
            "call mw.load_state_dict(state, path) to load its contents",
        )
    folder, step = catalogue.folder, catalogue.values["step"]
    if is_step(folder) and folder.name != step_name(step):
        raise CheckpointError(
            f"resuming from {folder}",
            f"a checkpoint of step {step}",
            "the folder was renamed, and the latest step is found by names",
            f"rename the folder to {step_name(step)}, or to a name that is not the name of a step",
        )


def _is_run(catalogue: Catalogue) -> bool:
    """True if a checkpoint has the entries that `save_checkpoint` writes."""
    values, entry = catalogue.values, catalogue.entries.get(RANDOM)
    groups = values.get(GROUPS, [])
    return (
        type(values.get("step")) is int
        and {"data", "scheduler"} <= values.keys()
        and entry is not None
        and entry.dtype is torch.uint8
        and len(entry.shape) in (1, 2)
        and isinstance(groups, list)
        and all(isinstance(group, dict) for group in groups)
    )


def _other_optimizer(catalogue: Catalogue, optimizer: Optimizer | None) -> str:
    """Return how the saved optimizer differs in kind, groups or options, in words; "" if it does not."""
    if optimizer is None:
        return ""
    groups, here = catalogue.values.get(GROUPS, []), optimizer.param_groups
    saved, kind = catalogue.values.get(KIND), type(optimizer).__name__
    if saved is not None and saved != kind:
        return f"states of {saved}, but the optimizer is {kind}"
    if len(groups) != len(here):
        return f"options of {len(groups)} parameter groups, but the optimizer has {len(here)}"
    for one, other in zip(groups, here, strict=True):
        lacks, has = one.keys() - other.keys(), other.keys() - one.keys() - {"params"}
        if saved is None and lacks and has:
            return f"options {', '.join(sorted(lacks))}, but {kind} has {', '.join(sorted(has))}"
    return ""


def _are_on_the_same_meshes(catalogue: Catalogue, tensors: Mapping[str, HeldTensor]) -> bool:
    """True if each distributed tensor of the model is on the mesh on which it was saved."""
    meshes = {name: held.spec.mesh for name, held in tensors.items() if held.spec is not None}
    return all(name in catalogue.entries and catalogue.entries[name].mesh is mesh for name, mesh in meshes.items())


def _states_for(catalogue: Catalogue, network: nn.Module, optimizer: Optimizer | None) -> States:
    """Return a tensor for every saved state: the existing one if it fits, else a new one in its parameter's layout."""
    if optimizer is None:
        return []
    keys = _saved_state_keys(catalogue)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found: States = []
    for name, p in _named(network, optimizer):
        there = optimizer.state.get(p, {})
        entries = {key: catalogue.entries[f"{STATE}{name}.{key}"] for key in keys.get(name, ())}
        kept = {key: there[key] for key, entry in entries.items() if _fits_entry(entry, there.get(key))}
        new = {
            key: _new_state(key, entry, p, _state_device(key, p, groups[id(p)], type(optimizer)))
            for key, entry in entries.items()
            if key not in kept
        }
        distribute_states(optimizer, p, new)
        found.append((name, p, {**new, **kept}))
    return found


def _saved_state_keys(catalogue: Catalogue) -> dict[str, list[str]]:
    """Return the keys of the saved states of each parameter."""
    found: dict[str, list[str]] = {}
    for entry in catalogue.entries:
        name, _, key = entry.removeprefix(STATE).rpartition(".")
        if entry.startswith(STATE):
            found.setdefault(name, []).append(key)
    return found


def _fits_entry(entry: TensorEntry, there: object) -> bool:
    return isinstance(there, Tensor) and tuple(there.shape) == entry.shape and there.dtype is entry.dtype


def _state_device(key: str, p: Tensor, options: Mapping[str, Any], kind: type[Optimizer]) -> torch.device:
    """Return where optimizers of torch keep a state: on the device of the parameter; most counters on the CPU."""
    is_on_host = key in _COUNTERS and not issubclass(kind, torch.optim.ASGD)
    needs_device = options.get("capturable") or options.get("fused")
    return torch.device("cpu") if is_on_host and not needs_device else p.device


def _new_state(key: str, entry: TensorEntry, p: Tensor, device: torch.device) -> Tensor:
    """Return a new state in the layout of its parameter; counters are plain, beside a parameter of one number too."""
    if not isinstance(p, DistTensor) or tuple(p.shape) != entry.shape or key in _COUNTERS:
        return torch.zeros(entry.shape, dtype=entry.dtype, device=device)
    spec = Spec(p.mesh, p.spec.layout.with_varying(()), p.shape, entry.dtype)
    rank = current_world().rank
    with local_parts():
        local = torch.zeros(spec.local_shape(rank), dtype=entry.dtype, device=device)
    return as_part(local, spec) if rank in spec.mesh else absent(local, spec)


def _put_back(catalogue: Catalogue, optimizer: Optimizer, states: States, left_out: Set[str]) -> None:
    """Give the optimizer the states of the parameters that were loaded; it has its options already."""
    for name, p, found in states:
        if f"{MODEL}{name}" in left_out:
            continue
        prefix = f"{STATE}{name}."
        plain = {n.removeprefix(prefix): v for n, v in catalogue.values.items() if n.startswith(prefix)}
        optimizer.state[p] = {**found, **{key: value for key, value in plain.items() if "." not in key}}
