"""Compiled kernels of the CPU, which a custom operator runs on the memory of a test device.

An operator of the device opens the pages of its operands, and records which of them it reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("test_device", "FRAGMENT")
_LIBRARY.define("run_kernel(Tensor[] read, Tensor(a!)[] written, int number) -> ()")
_KERNELS: list[tuple[Callable[..., None], tuple[int, ...]]] = []
"""Kernels, each with the places of its arguments among those that it reads and those that it writes."""
_NUMBERS: dict[tuple[int, tuple[bool, ...]], int] = {}


def call_kernel(kernel: Callable[..., None], writes: tuple[bool, ...], *args: Tensor) -> None:
    """Run a compiled kernel of the CPU on tensors of a device; `writes` says which of them it writes to.

    As in kernels of a GPU, a tensor without dims may be on the CPU: its value goes to the device.
    """
    read = [x for x, is_written in zip(args, writes, strict=True) if not is_written]
    written = [x for x, is_written in zip(args, writes, strict=True) if is_written]
    device = written[0].device
    read = [x.to(device) if x.dim() == 0 else x for x in read]
    torch.ops.test_device.run_kernel(read, written, _number(kernel, writes))


def _number(kernel: Callable[..., None], writes: tuple[bool, ...]) -> int:
    key = id(kernel), writes
    if key not in _NUMBERS:
        order = sorted(range(len(writes)), key=lambda at: writes[at])
        _NUMBERS[key] = len(_KERNELS)
        _KERNELS.append((kernel, tuple(order.index(at) for at in range(len(order)))))
    return _NUMBERS[key]


def _run(read: Sequence[Tensor], written: Sequence[Tensor], number: int) -> None:
    kernel, places = _KERNELS[number]
    given = (*read, *written)
    kernel(*(given[place] for place in places))


def _run_without_data(read: Sequence[Tensor], written: Sequence[Tensor], number: int) -> None:
    return None


_LIBRARY.impl("run_kernel", _run, "CPU")
_LIBRARY.impl("run_kernel", _run_without_data, "Meta")


def register_kernels() -> None:
    """Make Inductor compile programs for the test devices, in this thread and in threads that it starts.

    Inductor is imported here, because the import takes seconds.
    """
    from .inductor_backend import register

    register()
