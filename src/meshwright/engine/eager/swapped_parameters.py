"""Parameters with another layout while their module runs: another tensor takes their place until it ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from meshwright.layout import Spec
from meshwright.tensor import DistTensor, Mark, distribute_as, is_of_transform, mark_of, transforming

_known: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Module → the names of its parameters that are replaced while it runs."""


@dataclass(frozen=True, slots=True)
class SwappedParameter:
    """A parameter of a module, and the tensor that takes its place until `put_back`."""

    module: nn.Module
    name: str
    own: Tensor
    stand_in: Tensor
    mark: Mark | None

    @staticmethod
    def swap(module: nn.Module, name: str, stand_in: Tensor) -> SwappedParameter:
        """Replace the parameter by `stand_in`."""
        table: dict[str, Any] = module._parameters
        found = SwappedParameter(module, name, table[name], stand_in, _mark(stand_in))
        table[name] = stand_in
        return found

    def put_back(self) -> None:
        """Give the parameter back to the module, with the values that the module wrote to it meanwhile.

        A parameter that the module assigned meanwhile stays.
        """
        if _mark(self.stand_in) != self.mark:
            with torch.no_grad():
                self.own.copy_(self.stand_in)
        table: dict[str, Any] = self.module._parameters
        if table.get(self.name) is self.stand_in:
            table[self.name] = self.own


def _mark(x: Tensor) -> Mark | None:
    """Return the mark of the memory of `x`; None inside a transform, which hides it."""
    return None if transforming() else mark_of(x)


class SwapObserver(Protocol):
    """An observer of a module's run: its beginning, with pairs (parameter, replacement), and its end."""

    def enter(self, stand_ins: Iterable[tuple[Tensor, Tensor]], /) -> None: ...

    def leave(self) -> None: ...


def swap_parameters(module: nn.Module, owned: Mapping[str, Spec], watch: SwapObserver | None = None) -> None:
    """Give the parameters of `module` the layouts `owned` while it runs; gradients go to the original parameters.

    A parameter that is replaced already is left as it is. So is one that the module no longer has, and a tensor that
    `torch.func.functional_call` puts in its place inside a transform: transforms see whole tensors.
    """
    taken = _known.setdefault(module, set())
    new = {name: spec for name, spec in owned.items() if name not in taken}
    if new:
        taken.update(new)
        running = _ParameterSwap(new, watch)
        module.register_forward_pre_hook(running.before)
        module.register_forward_hook(running.behind, always_call=True)


def is_swapped(module: nn.Module, name: str) -> bool:
    """True if the parameter is replaced while `module` runs."""
    return name in _known.get(module, ())


class _ParameterSwap:
    def __init__(self, owned: Mapping[str, Spec], watch: SwapObserver | None) -> None:
        self._owned, self._watch = owned, watch
        self._held: list[list[SwappedParameter]] = []

    def before(self, module: nn.Module, *_: object) -> None:
        table: dict[str, Any] = module._parameters
        held: list[SwappedParameter] = []
        self._held.append(held)
        with torch.inference_mode(False), torch.enable_grad():  # as a parameter, whatever mode it is used in
            for name, spec in self._owned.items():
                p = table.get(name)
                if p is not None and not _has_layout(p, spec) and not is_of_transform(p):
                    held.append(SwappedParameter.swap(module, name, distribute_as(p, spec.mesh, spec.layout)))
        if self._watch is not None:
            self._watch.enter([(each.own, each.stand_in) for each in held])

    def behind(self, *_: object) -> None:
        if self._held:
            for each in self._held.pop():
                each.put_back()
            if self._watch is not None:
                self._watch.leave()


def _has_layout(p: Any, spec: Spec) -> bool:
    """True if a parameter has this layout already, as one that was gathered for a group of modules."""
    return isinstance(p, DistTensor) and p.spec.mesh is spec.mesh and p.spec.layout == spec.layout
