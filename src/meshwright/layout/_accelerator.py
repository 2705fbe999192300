"""The devices of this process: their types, their autocast, and the states of their random generators."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

CPU = "cpu"


def device_types() -> tuple[str, ...]:
    """Return "cpu", and the type of the accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator()
    return (CPU,) if accelerator is None else (CPU, accelerator.type)


def autocast_modes() -> tuple[tuple[str, torch.dtype], ...]:
    """Return the types of devices for which autocast is on in this thread, each with its dtype."""
    types = dict.fromkeys((CPU, "cuda", *device_types()))  # CUDA also without a device: programs are recorded for it
    return tuple((each, torch.get_autocast_dtype(each)) for each in types if torch.is_autocast_enabled(each))


@lru_cache(1)
def can_pin_memory() -> bool:
    """True if the accelerator can pin memory of the host, so that copies need no wait."""
    try:
        torch.empty(1, pin_memory=True, device="cpu")
    except (NotImplementedError, RuntimeError):  # the kind depends on the device
        return False
    return True


def generator_state(device: str | torch.device = CPU) -> Tensor:
    """Return the state of the default random generator of a device."""
    kind = torch.device(device).type
    if kind == CPU:
        return torch.default_generator.get_state()
    module = _module(kind)
    return module.get_rng_state(device) if module.device_count() > 1 else module.get_rng_state()


def set_generator_state(state: Tensor, device: str | torch.device = CPU) -> None:
    """Set the state of the default random generator of a device."""
    kind = torch.device(device).type
    if kind == CPU:
        torch.default_generator.set_state(state)
    elif (module := _module(kind)).device_count() > 1:
        module.set_rng_state(state, device)
    else:
        module.set_rng_state(state)


def generator_states() -> dict[str, Tensor]:
    """Return the states of the default generators by device: of the CPU, and of an accelerator that is initialized."""
    return {device: generator_state(device) for device in (CPU, *accelerators_in_use())}


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    """Set the states of the default generators of these devices."""
    for device, state in states.items():
        set_generator_state(state, device)


def accelerators_in_use() -> tuple[str, ...]:
    """Return the names of all devices of the accelerator; none before it is initialized."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not getattr(_module(accelerator.type), "is_initialized", _true)():
        return ()
    return tuple(f"{accelerator.type}:{at}" for at in range(torch.accelerator.device_count()))


def _module(kind: str) -> Any:
    return torch.get_device_module(kind)


def _true() -> bool:
    return True
