"""The setting of a program: everything that Python read while it was recorded, layouts of tensors, and torch's state.

A program is recorded once. Before it runs again, its setting is compared with the present one. This finds changed
attributes and globals, switched layers, frozen or replaced parameters, loaded states, and hooks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.graph import Capture, Guards, backend_flags, is_autocast_on, model_tensors, modes_on
from meshwright.layout import TorchValue, autocast_modes
from meshwright.tensor import DistTensor, attention_algorithm, current_random_source, key_of_tree, local_parts

from .._errors import StaticError
from ..eager.local_step import own_hook
from .fast_setting import FastSetting
from .setting_text import layout_text

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Roots:
    """The objects from which a program was recorded: a network, functions beside it such as the loss, an optimizer."""

    network: nn.Module
    calls: tuple[Any, ...] = ()
    optimizer: Optimizer | None = None

    def named(self) -> dict[str, Any]:
        """Return the roots of `Guards`, by name."""
        return {"network": self.network, **{f"call{at}": call for at, call in enumerate(self.calls)}, **self.beside}

    @property
    def beside(self) -> dict[str, Any]:
        """Return the objects that a capture does not run."""
        return {} if self.optimizer is None else {"optimizer": self.optimizer}


@dataclass(slots=True)
class Setting:
    """The setting that one program was recorded in."""

    roots: Roots
    guards: Guards
    state: tuple[Any, ...]
    layouts: tuple[Any, ...]
    _fast: FastSetting | None = field(default=None, init=False)
    """The present objects, if they were equal to those of the setting."""

    @classmethod
    def of(cls, roots: Roots, captured: Capture) -> Setting:
        """Return the setting of now, for a program of a captured call.

        The places of the capture are those of the program if no other code ran since, and nothing changed.
        """
        places = captured.places
        known = places is not None and places.are_of(captured.ran) and places.guards.holds()
        guards = places.guards if places is not None and known else Guards.of(roots.named(), captured.ran)
        with local_parts():
            return cls(roots, guards, _state_of(roots), _layouts_of(roots))

    def holds(self) -> bool:
        """True if nothing changed that the program depends on."""
        with local_parts():
            if _state_of(self.roots) != self.state:
                return False
            if self._fast is not None and self._fast.holds():
                return True
            if not self.guards.holds() or _layouts_of(self.roots) != self.layouts:
                return False
            self._fast = FastSetting(self.guards, self.roots.network, self.roots.optimizer)
            return True

    def changed(self) -> str | None:
        """Return the name of a place that changed, and its values, for people."""
        found = next(self.guards.changes(), None)
        return None if found is None else f"{found[0]} was {found[1]!r:.60}, and is {found[2]!r:.60}"


def first_marks(network: nn.Module) -> dict[str, str]:
    """Return the layouts of parameters and buffers as text, by name."""
    return {slot.name: layout_text(slot.tensor) for slot in model_tensors(network)}


def torch_state() -> tuple[Any, ...]:
    """Return the state of torch and of this library that operators and layers depend on."""
    modes = modes_on()
    device = torch.get_default_device() if modes else _CPU  # a mode creates tensors on another default device
    return (
        (current_random_source(), attention_algorithm(), torch.get_default_dtype(), device),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled()),
        (torch.get_float32_matmul_precision(), modes, backend_flags()),
        *(autocast_modes() if is_autocast_on() else ()),
    )


def _state_of(roots: Roots) -> tuple[Any, ...]:
    """Return the state of torch, the hooks of the optimizer, and the parameters and tensors of its groups."""
    optimizer = roots.optimizer
    if optimizer is None:
        return torch_state()
    groups = [
        (list(map(id, group["params"])), [id(x) for x in group.values() if isinstance(x, Tensor)])
        for group in optimizer.param_groups
    ]
    return (*torch_state(), _hooks(optimizer, STEP_HOOKS, own_hook(optimizer)), groups)


def _layouts_of(roots: Roots) -> tuple[Any, ...]:
    """Return the layouts of parameters, buffers and the optimizer's states, with the hooks of parameters."""
    return (*_of_network(roots.network), *_of_states(roots.optimizer))


def _of_network(network: nn.Module) -> Iterator[Any]:
    for part in network.modules():
        for p in part._parameters.values():
            yield None if p is None else (p.requires_grad, _layout_of(p), _hooks(p, PARAMETER_HOOKS))
        yield from (None if x is None else _layout_of(x) for x in part._buffers.values())


def _of_states(optimizer: Optimizer | None) -> Iterator[Any]:
    for p, state in optimizer.state.items() if optimizer is not None else ():
        yield id(p), [(key, _layout_of(v) if isinstance(v, Tensor) else type(v)) for key, v in state.items()]


def _hooks(owner: object, kinds: tuple[str, ...], own: int | None = None) -> tuple[Any, ...]:
    """Return the ids of the hooks of a parameter or an optimizer other than our `own`; torch never reuses an id."""
    held = [tuple(number for number in getattr(owner, kind, None) or () if number != own) for kind in kinds]
    return tuple(held) if any(held) else ()


def _layout_of(x: Tensor) -> object:
    return x._spec if type(x) is DistTensor else (x.shape, x.dtype, x.device)


def form_of(tree: TorchValue) -> Hashable:
    """Return the structure of a batch without its tensors: types, lengths, keys in their order.

    Raises StaticError for a leaf that is no tensor and cannot be compared.
    """
    return key_of_tree(tree, _check_leaf)


def _check_leaf(leaf: TorchValue) -> None:
    if not isinstance(leaf, Tensor) and not isinstance(leaf, Hashable):
        raise StaticError(
            f"a batch with a {type(leaf).__name__}",
            "a value that is neither a tensor nor hashable",
            "a value that is not a tensor becomes part of the key that selects a program",
            "pass torch.as_tensor(x)",
        )
