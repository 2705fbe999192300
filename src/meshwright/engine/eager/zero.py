"""ZeRO in the eager mode: optimizer states, gradients and parameters are sharded along axes that shard the batch.

All three stages are layouts (Rajbhandari et al. 2020). In stage 1 a parameter is sharded only during the optimizer's
step. In stages 2 and 3 it is always sharded, and the modules that own it compute with the whole parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.layout import MeshError, Spec
from meshwright.passes import further_sharded
from meshwright.tensor import DistTensor, distribute_as, keep_own_part

from ..marks.module_memory import refuse_shared_parameters
from .gather_order import GatherOrder
from .parameter_unit import Slot
from .regather import SavedPartHooks
from .swapped_parameters import is_swapped, swap_parameters
from .unit_choice import UnitNames, units_of

Axes = str | tuple[str, ...]
Cut = Mapping[Tensor, Spec]
"""Parameter → its sharded layout."""


@dataclass(frozen=True)
class ShardingStage1:
    """ZeRO stage 1: states sharded along `axes`. Each rank updates its part of a parameter; then parts are gathered.

    Parameters of fewer than `least` elements stay whole.
    """

    axes: Axes
    least: int = 1024

    def around(self, optimizer: Optimizer) -> UpdatedParts:
        """Return the work around each step. Raises MeshError if a parameter's mesh lacks an axis."""
        return UpdatedParts(_cut(optimizer, self.axes, self.least, self))


@dataclass(frozen=True, slots=True)
class UpdatedParts:
    """The parts of parameters that each rank updates in stage 1; states have their layouts."""

    cut: Cut
    _wholes: dict[Tensor, tuple[Spec, Any]] = field(default_factory=dict[Tensor, "tuple[Spec, Any]"], repr=False)

    def before(self) -> None:
        """Shard the parameters and their gradients for a step."""
        for p, spec in self.cut.items():
            self._wholes[p] = (_spec(p), p.grad)
            _relayout_with_gradient(p, spec)

    def behind(self) -> None:
        """Gather the updated parameters."""
        for p, (spec, grad) in self._wholes.items():
            p.grad = None
            keep_own_part(p, spec)
            p.grad = grad
        self._wholes.clear()

    def shard_states(self, parameter: Tensor, states: dict[str, Any]) -> None:
        """Shard states that were loaded, such as whole ones, in the layout in which the parameter is updated."""
        spec = self.cut.get(parameter)
        for key, value in states.items():
            if spec is not None and isinstance(value, Tensor) and value.shape == parameter.shape:
                states[key] = distribute_as(value, spec.mesh, spec.layout)


@dataclass(frozen=True)
class ShardingStage2:
    """ZeRO stage 2: states, gradients and parameters sharded along `axes`; modules gather them once per step.

    Modules gather the parameters that they own. A gathered parameter lives from its module's forward to its backward
    pass. Its gradient is reduced and scattered. Parameters of fewer than `least` elements stay whole.
    """

    axes: Axes
    model: nn.Module = field(repr=False)
    least: int = 1024

    def apply(self, optimizer: Optimizer) -> None:
        """Shard the parameters, and hook the modules. Raises MeshError if a parameter's mesh lacks an axis."""
        gather_at_use(self.model, _cut(optimizer, self.axes, self.least, self))


@dataclass(frozen=True)
class ShardingStage3:
    """ZeRO stage 3: like stage 2, but a gathered parameter is freed after the forward pass and gathered again.

    The parameters of a unit are gathered by one call, and so are their gradients reduced. By default each block of a
    `ModuleList` or a `Sequential` of equal blocks is a unit, and the rest of the model is one. `units` names others by
    patterns of module paths: `["layers.*", ("norm", "head")]` makes a unit of each layer, and one of `norm` and `head`.
    """

    axes: Axes
    model: nn.Module = field(repr=False)
    least: int = 1024
    units: UnitNames | None = None

    def apply(self, optimizer: Optimizer) -> None:
        """Shard the parameters, and hook the modules.

        Raises:
            MeshError: a parameter's mesh lacks an axis.
            StrategyError: a pattern of `units` matches no module.
        """
        gather_in_units(self.model, _cut(optimizer, self.axes, self.least, self), self.units)


ShardingStage = ShardingStage1 | ShardingStage2 | ShardingStage3


def _cut(optimizer: Optimizer, axes: Axes, least: int, asked: ShardingStage) -> Cut:
    """Return the parameters that are to be sharded, with their sharded layouts."""
    names = (axes,) if isinstance(axes, str) else axes
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = {p: _cut_of(p, names, least, asked) for p in parameters}
    refuse_shared_parameters(parameters, repr(asked))
    return {p: spec for p, spec in found.items() if spec is not _spec(p)}


def _cut_of(p: Tensor, axes: tuple[str, ...], least: int, asked: ShardingStage) -> Spec:
    axis = next((a for a in axes if not isinstance(p, DistTensor) or a not in p.spec.mesh.sizes), None)
    if axis is not None:
        found = f"a parameter on {p.spec.mesh!r}" if isinstance(p, DistTensor) else "a parameter that is on no mesh"
        raise MeshError(
            repr(asked),
            found,
            f"the parameter has no mesh axis {axis!r} to be sharded along",
            "call mw.shard_layer(model, mesh) before you create the optimizer, and name an axis of that mesh",
        )
    return further_sharded(_spec(p), axes, least)


def _spec(p: Any) -> Spec:
    return p.spec


def _relayout_with_gradient(p: Tensor, spec: Spec) -> None:
    """Change the layout of a parameter to `spec`, and that of its gradient to the dual one."""
    grad = p.grad
    part = None if grad is None else distribute_as(grad, spec.mesh, spec.dual().layout)
    p.grad = None
    keep_own_part(p, spec)
    p.grad = part


# --- parameters that are gathered where they are used --------------------------------------------------------------


def gather_at_use(model: nn.Module, cut: Cut) -> None:
    """Shard the parameters, and gather them while a module that owns them runs."""
    for module, owned in _shard_owned(model, cut).items():
        swap_parameters(module, owned)


def gather_in_units(model: nn.Module, cut: Cut, names: UnitNames | None = None) -> None:
    """Shard the parameters, and gather them unit by unit while modules run, and again for the backward pass.

    A module that runs while its unit does not gathers its own parameters, one by one.
    """
    owned_by = _shard_owned(model, cut)
    slots = [
        Slot(module, name, whole)
        for module, owned in owned_by.items()
        for name, whole in owned.items()
        if not is_swapped(module, name)
    ]
    order = GatherOrder()
    model.register_forward_pre_hook(order.before_model)
    for unit in units_of(model, slots, names, order):
        unit.put_on()
    model.register_forward_hook(order.behind_model, always_call=True)
    regather = SavedPartHooks()
    for module, owned in owned_by.items():
        swap_parameters(module, owned, regather)


def _shard_owned(model: nn.Module, cut: Cut) -> dict[nn.Module, dict[str, Spec]]:
    """Shard the parameters. Return the names of each module's own ones, with the layouts of the gathered ones."""
    wholes = {p: _varying(_spec(p), spec) for p, spec in cut.items()}
    for p, spec in cut.items():
        _relayout_with_gradient(p, spec)
    found: dict[nn.Module, dict[str, Spec]] = {}
    for module in model.modules():
        owned = {name: wholes[p] for name, p in module._parameters.items() if p is not None and p in wholes}
        if owned:
            found[module] = owned
    return found


def _varying(whole: Spec, cut: Spec) -> Spec:
    """Return the layout of the gathered parameter; it is varying, so that its gradient is scattered."""
    axes = tuple(a for a in cut.layout.cut_axes if a not in whole.layout.axes)
    return whole.with_layout(replace(whole.layout, varying=(*whole.layout.varying, *axes)))
