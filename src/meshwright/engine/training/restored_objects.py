"""Python objects of a training run that take their saved states back, all of them or none."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.checkpoint import CheckpointError
from meshwright.layout import MeshwrightError


class Stateful(Protocol):
    """An object that gives its state and takes one."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> object: ...


class Restored:
    """Objects that load their saved states; `undo` restores their earlier states.

    Only a call of `load_state_dict` shows if an object accepts a state. So all objects load before the first tensor is
    written. If one of them raises on any rank, all objects are restored.
    """

    def __init__(self, things: Mapping[str, tuple[Stateful, Any]]) -> None:
        self._things = things
        self._before: list[tuple[Stateful, Any, dict[str, Any]]] = []

    def put(self) -> None:
        """Give every object its state. Raises CheckpointError, or the object's own error of this library."""
        for name, (thing, state) in self._things.items():
            try:
                self._before.append((thing, deepcopy(thing.state_dict()), dict(getattr(thing, "__dict__", {}))))
                thing.load_state_dict(state)
            except MeshwrightError:
                raise
            except Exception as error:
                raise CheckpointError(
                    f"restoring {name}",
                    f"{type(error).__name__}: {error}",
                    f"{type(thing).__name__} rejects the saved state: {str(state)[:200]}",
                    f"pass the {name} that was saved, or {name}=None; nothing was loaded",
                ) from error

    def undo(self) -> None:
        """Restore the state and the attributes of every object that was asked to load."""
        for thing, state, attributes in reversed(self._before):
            with suppress(Exception):  # the error that led here is the one to tell
                thing.load_state_dict(state)
            if attributes:
                vars(thing).clear()
                vars(thing).update(attributes)
        self._before.clear()


class ExtraStates:
    """State of a network's modules other than tensors (`get_extra_state`)."""

    __slots__ = ("_network",)

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def state_dict(self) -> dict[str, Any]:
        """Return the extra states by name."""
        return {name: x for name, x in self._network.state_dict().items() if not isinstance(x, Tensor)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give modules their extra states."""
        self._network.load_state_dict(state, strict=False)


KERNEL_OPTIONS = frozenset({"capturable", "foreach", "fused"})
"""Options of torch's optimizers that choose kernels; the optimizer that loads a checkpoint keeps its own."""


class Options:
    """Options of an optimizer's parameter groups."""

    __slots__ = ("_optimizer",)

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the options of each group; numbers in tensors as numbers."""
        return [
            {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
            for group in self._optimizer.param_groups
        ]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Set the options of each group, except the choice of kernels, which depends on the device.

        Raises TypeError if a number is replaced by something else.
        """
        for group, options in zip(self._optimizer.param_groups, state, strict=True):
            for key, value in options.items():
                if key in KERNEL_OPTIONS and key in group:
                    continue
                now = group.get(key)
                if isinstance(now, (int, float, Tensor)) and not isinstance(value, (int, float)):
                    raise TypeError(f"{key} is a number in the optimizer, and {type(value).__name__} in the checkpoint")
                if isinstance(now, Tensor):
                    now.fill_(value)
                else:
                    group[key] = value
