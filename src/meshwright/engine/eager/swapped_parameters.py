"""Parameters with another layout while their module runs: another tensor takes their place until it ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from meshwright.layout import Spec
from meshwright.tensor import DistTensor, distribute_as

_known: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Module → the names of its parameters that are replaced while it runs."""


class SwapObserver(Protocol):
    """An observer of a module's run: its beginning, with pairs (parameter, replacement), and its end."""

    def enter(self, stand_ins: Iterable[tuple[Tensor, Tensor]], /) -> None: ...

    def leave(self) -> None: ...


def swap_parameters(module: nn.Module, owned: Mapping[str, Spec], watch: SwapObserver | None = None) -> None:
    """Give the parameters of `module` the layouts `owned` while it runs; gradients go to the original parameters.

    A parameter that is replaced already is left as it is. So is one that the module no longer has.
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
        self._held: list[dict[str, Any]] = []

    def before(self, module: nn.Module, *_: object) -> None:
        table: dict[str, Any] = module._parameters
        held = {
            name: table[name]
            for name, spec in self._owned.items()
            if table.get(name) is not None and not _has_layout(table[name], spec)
        }
        self._held.append(held)
        for name, p in held.items():
            table[name] = distribute_as(p, self._owned[name].mesh, self._owned[name].layout)
        if self._watch is not None:
            self._watch.enter([(p, table[name]) for name, p in held.items()])

    def behind(self, module: nn.Module, *_: object) -> None:
        if self._held:
            module._parameters.update(self._held.pop())
            if self._watch is not None:
                self._watch.leave()


def _has_layout(p: Any, spec: Spec) -> bool:
    """True if a parameter has this layout already, as one that was gathered for a group of modules."""
    return isinstance(p, DistTensor) and p.spec.mesh is spec.mesh and p.spec.layout == spec.layout
