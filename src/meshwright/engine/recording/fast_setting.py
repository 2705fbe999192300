"""Fast comparison of a setting: the objects of a network and an optimizer with those at the last full comparison.

C code iterates over flat lists, so a call of a large model costs a few hundred nanoseconds for each layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.graph import FastComparison, Guards, model_tensors, tensor_comparison
from meshwright.tensor import DistTensor

_HOOKS = (attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks"))
_SPEC = attrgetter("_spec")


class FastSetting:
    """The values of a guard, and the layouts and hooks of tensors at construction. Call it inside `local_parts`.

    The guard compares the parameters and buffers of each layer by identity.
    """

    def __init__(self, guards: Guards, network: nn.Module, optimizer: Optimizer | None) -> None:
        self._values = FastComparison(guards.slots)
        slots = model_tensors(network)
        for parameter in (slot.tensor for slot in slots if slot.is_parameter):
            for hooks_of in _HOOKS:
                hooks = hooks_of(parameter)
                self._values.add_read(hooks_of, parameter, hooks)
                if hooks is not None:
                    self._values.add_container(hooks)
        self._tensors = [slot.tensor for slot in slots]
        self._layouts = _Layouts(self._tensors)
        self._states = None if optimizer is None else _States(optimizer)

    def holds(self) -> bool:
        """True if nothing changed; False if something may have changed."""
        same = self._values.holds() and self._layouts.are_of(self._tensors)
        return same and (self._states is None or self._states.hold())


class _Layouts:
    """The classes, dtypes, devices, sizes and specs of some tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._are_alike = tensor_comparison(tensors)
        self._distributed = [isinstance(x, DistTensor) for x in tensors]
        self._specs = list(map(_SPEC, compress(tensors, self._distributed)))

    def are_of(self, tensors: Iterable[Tensor]) -> bool:
        """True if these tensors have the same layouts."""
        specs = map(_SPEC, compress(tensors, self._distributed))
        return self._are_alike(*tensors) and all(map(is_, specs, self._specs))


class _States:
    """The states of an optimizer by parameter and key, with their layouts; it keeps no state in memory."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._keys, values = self._now()
        self._is_tensor = [isinstance(x, Tensor) for x in values]
        self._types = list(map(type, values))
        self._layouts = _Layouts(list(compress(values, self._is_tensor)))

    def _now(self) -> tuple[object, list[Any]]:
        states: Any = self._optimizer.state
        held = list(states.values())
        keys = (list(map(id, states)), list(map(len, held)), list(chain.from_iterable(held)))
        return keys, list(chain.from_iterable(map(dict.values, held)))

    def hold(self) -> bool:
        """True if the optimizer has states of the same layouts now."""
        keys, values = self._now()
        if keys != self._keys or list(map(type, values)) != self._types:
            return False
        return self._layouts.are_of(list(compress(values, self._is_tensor)))
