"""Registration of the test devices as `mesh:0` to `mesh:3`, and the module `torch.mesh`."""

from __future__ import annotations

import atexit
import functools
import time
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .build import load

NAME = "mesh"


@functools.cache
def register() -> ModuleType:
    """Return the extension, after its devices have become the accelerator of this process; cannot be undone."""
    core = load()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, DeviceModule(core))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # autograd's threads may free the last graph after `backward` returns; the interpreter must not end before
    atexit.register(time.sleep, 0.1)
    return core


def register_kernels() -> None:
    """Make Inductor compile programs for the test devices, in this thread and in threads that it starts.

    Inductor is imported here, because the import takes seconds.
    """
    from .inductor_backend import register as register_compiler

    register_compiler()


class DeviceModule(ModuleType):
    """The functions that torch expects of the module of a device, such as `torch.cuda`."""

    def __init__(self, core: Any) -> None:
        super().__init__(f"torch.{NAME}")
        self._core = core
        self.Stream = torch.Stream
        self.Event = torch.Event

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        return None

    def device_count(self) -> int:
        return self._core.device_count()

    def current_device(self) -> int:
        return self._core.current_device()

    def set_device(self, device: torch.device | int | str) -> None:
        self._core.exchange_device(self._index(device))

    def device(self, device: torch.device | int | str) -> torch.device:
        return torch.device(NAME, self._index(device))

    def synchronize(self, device: torch.device | int | str | None = None) -> None:
        torch.accelerator.synchronize(self._index(device))

    def current_stream(self, device: torch.device | int | str | None = None) -> torch.Stream:
        return torch.accelerator.current_stream(self._index(device))

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        return tuple(map(self._core.default_generator, range(self.device_count())))

    def manual_seed(self, seed: int) -> None:
        self._core.default_generator(self.current_device()).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def initial_seed(self) -> int:
        return self._core.default_generator(self.current_device()).initial_seed()

    def get_rng_state(self, device: torch.device | int | str = NAME) -> Tensor:
        return self._core.default_generator(self._index(device)).get_state()

    def set_rng_state(self, state: Tensor, device: torch.device | int | str = NAME) -> None:
        self._core.default_generator(self._index(device)).set_state(state)

    def get_rng_state_all(self) -> list[Tensor]:
        return [generator.get_state() for generator in self.default_generators]

    def set_rng_state_all(self, states: list[Tensor]) -> None:
        for generator, state in zip(self.default_generators, states, strict=True):
            generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self) -> bool:
        return True

    def memory_allocated(self, device: torch.device | int | str | None = None) -> int:
        return torch.accelerator.memory_allocated(self._index(device))

    def max_memory_allocated(self, device: torch.device | int | str | None = None) -> int:
        return torch.accelerator.max_memory_allocated(self._index(device))

    def reset_peak_memory_stats(self, device: torch.device | int | str | None = None) -> None:
        torch.accelerator.reset_peak_memory_stats(self._index(device))

    def empty_cache(self) -> None:
        return None

    def _index(self, device: torch.device | int | str | None) -> int:
        if device is None:
            return self.current_device()
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return self.current_device() if index is None else index
