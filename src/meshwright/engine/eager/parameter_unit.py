"""A unit: modules whose parameters are gathered together while the modules run, and again for the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from meshwright.comm import current_communicator
from meshwright.layout import Spec
from meshwright.tensor import JointGather, can_gather_jointly, gathered_axes, in_backward

from .gather_order import GatheredUnit, GatherOrder
from .regather import forget_gathered, remember_gathered
from .swapped_parameters import SwappedParameter


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A place of a parameter in a module, and the layout of the gathered parameter."""

    module: nn.Module
    name: str
    whole: Spec

    def get(self) -> Any:
        return self.module._parameters.get(self.name)


class ParameterUnit:
    """The parameters at some places of modules, gathered from the first of its `modules` that runs to the last one."""

    def __init__(self, modules: Sequence[nn.Module], slots: Sequence[Slot], order: GatherOrder) -> None:
        self.around: tuple[GatheredUnit, ...] = ()
        self._modules, self._order = tuple(modules), order
        self._slots = tuple(slots)
        self._parts: list[Tensor] = []
        self._gathers: list[JointGather] = []
        self._swapped: list[SwappedParameter] = []
        self._addresses: list[int] = []
        self._entered: list[bool] = []
        self._left: set[nn.Module] = set()

    @property
    def is_open(self) -> bool:
        return bool(self._swapped)

    def put_on(self) -> None:
        """Register the hooks of the modules, and of those that own the parameters."""
        owners = dict.fromkeys(slot.module for slot in self._slots)
        for module in self._modules:
            module.register_forward_pre_hook(self._before)
            module.register_forward_hook(self._behind, always_call=True)
        for module in owners.keys() - set(self._modules):
            module.register_forward_pre_hook(self._before_owner)
            module.register_forward_hook(self._behind, always_call=True)

    def _before(self, *_: object) -> None:
        if not self.is_open:
            self._left = set(self._modules)
            self._open()
        self._entered.append(self.is_open)

    def _before_owner(self, *_: object) -> None:
        """Gather the unit for a module that runs again in a backward pass, as `torch.utils.checkpoint` does."""
        if not self.is_open and in_backward():
            self._left = set()
            self._open()
        self._entered.append(self.is_open)

    def _behind(self, module: nn.Module, *_: object) -> None:
        if self._entered and self._entered.pop():
            self._left.discard(module)
            if not any(self._entered) and not (self._left and self._order.is_running):
                self.close()

    def _open(self) -> None:
        """Replace the parameters by gathered ones; the parameters stay if they cannot be gathered together."""
        if not self._is_ready():
            return
        self._order.use(self)
        noted: list[tuple[Tensor, Any]] = []
        became: dict[int, Tensor] = {}
        for gather in self._gathers:
            for at, (part, whole) in enumerate(zip(gather.parts, gather.gathered(), strict=True)):
                became[id(part)] = whole
                noted.append((whole, partial(self._again, gather, at)))
        self._addresses = remember_gathered(noted)
        self._swapped = [
            SwappedParameter.swap(slot.module, slot.name, became[id(slot.get())])
            for slot in self._slots
            if id(slot.get()) in became
        ]

    def close(self) -> None:
        for each in self._swapped:
            each.put_back()
        if self._swapped:
            self._swapped = []
            forget_gathered(self._addresses)
            self._order.closed(self)

    def start(self) -> None:
        if self._is_ready():
            for gather in self._gathers:
                gather.start()

    def gather(self) -> None:
        for gather in self._gathers:
            gather.free_if_written()
            gather.memory()

    def free(self) -> None:
        for gather in self._gathers:
            gather.free()

    def _again(self, gather: JointGather, at: int) -> Tensor:
        """Return the gathered parameter for the backward pass."""
        if gather in self._gathers:
            self._order.use(self)
            return gather.memory()[at]
        found = gather.memory()[at]  # the parameters of the modules are others now
        gather.free()
        return found

    def _is_ready(self) -> bool:
        """True if the parameters can be gathered together; updates the calls if parameters were replaced or removed."""
        places = by_parameter(self._slots)
        parts = [slots[0].get() for slots in places]
        if not can_gather_jointly(parts):
            return False
        if not (_are_same(parts, self._parts) and all(gather.is_possible() for gather in self._gathers)):
            self.free()
            calls = _calls_of(parts, [slots[0].whole for slots in places])
            self._parts, self._gathers = ([], []) if calls is None else (parts, calls)
        return bool(self._parts)


def by_parameter(slots: Iterable[Slot]) -> list[list[Slot]]:
    """Return the places of each parameter; a place without a parameter is left out."""
    found: dict[int, list[Slot]] = {}
    for slot in slots:
        if slot.get() is not None:
            found.setdefault(id(slot.get()), []).append(slot)
    return list(found.values())


def _are_same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _calls_of(parts: Sequence[Any], layouts: Sequence[Spec]) -> list[JointGather] | None:
    """Return the calls that gather these parameters; None if some of them need more than a gather.

    Parameters that differ in dtype, device, mesh or gathered axes need a call each. Those of other ranks need none.
    """
    rank = current_communicator().rank
    groups: dict[object, list[tuple[Any, Spec]]] = {}
    for part, like in zip(parts, layouts, strict=True):
        spec = part.spec
        whole = Spec(spec.mesh, like.layout, spec.shape, spec.dtype)
        axes = gathered_axes(spec, whole)
        if not axes:
            return None
        if rank in spec.mesh:
            groups.setdefault((spec.mesh, axes, spec.dtype, part.device), []).append((part, whole))
    return [JointGather([part for part, _ in group], [whole for _, whole in group]) for group in groups.values()]
