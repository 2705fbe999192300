"""A backend of Inductor for the test devices: the kernels, the memory plan and the bits of programs for the CPU.

A custom operator runs a kernel of the CPU on the memory of a device. As for each operator, the device opens the pages
of the operands, and records which of them are read and written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.device_interface import CpuInterface, register_interface_for_device
from torch._inductor import config, ir, lowering, virtualized
from torch._inductor.codegen.common import DeviceOpOverrides, register_backend_for_device, register_device_op_overrides
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen

from .backend import NAME

_GPU_OPTIONS = ("loop_ordering_after_fusion", "loop_reindexing_after_fusion", "loop_index_inversion_in_fusion")
"""Options that Inductor ignores for the CPU, because its kernels for the CPU do not support them."""
_CONCATENATION_OPTIONS = ("max_complex_pointwise_cat_inputs", "max_pointwise_cat_inputs")
"""Numbers of tensors up to which Inductor computes a concatenation in its users, as it never does for the CPU."""


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


class Interface(CpuInterface):
    """The functions of the device that compiled programs use."""

    @staticmethod
    def current_device() -> int:
        return torch.accelerator.current_device_index()

    @staticmethod
    def device_count() -> int:
        return torch.accelerator.device_count()

    @staticmethod
    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize()


class Lines(DeviceOpOverrides):
    """Lines of generated code that concern the device."""

    def set_device(self, device_idx: int) -> str:
        return f"torch.accelerator.set_device_index({device_idx})"

    def device_guard(self, device_idx: int) -> str:
        return f"torch.accelerator.device_index({device_idx})"

    def synchronize(self) -> str:
        return "torch.accelerator.synchronize()"

    def import_get_raw_stream_as(self, name: str) -> str:
        return f"def {name}(_):\n    return 0\n"


class Wrapper(PythonWrapperCodegen):
    """Generated code that calls kernels by `call_kernel`."""

    @staticmethod
    def create(is_subgraph: bool, *args: Any, **options: Any) -> PythonWrapperCodegen:
        return PythonWrapperCodegen.create(is_subgraph, *args, **options) if is_subgraph else Wrapper()

    def write_header(self) -> None:
        super().write_header()
        self.imports.splice(f"from {call_kernel.__module__} import {call_kernel.__name__}")

    def _generate_kernel_call_helper(
        self, kernel_name: str, call_args: Any, *, arg_types: Any = None, **options: Any
    ) -> None:
        writes = tuple(not str(kind).startswith("const ") for kind in arg_types)
        self.writeline(f"{call_kernel.__name__}({kernel_name}, {writes!r}, {', '.join(map(str, call_args))})")


@functools.cache
def register() -> None:
    """Make Inductor compile programs for the test devices as for the CPU, in this thread and those that it starts."""
    config.cuda_backend = "cpp"  # Inductor reads it for each device that it does not know
    for option in _GPU_OPTIONS:
        if hasattr(config, option):
            setattr(config, option, False)
    for option in _CONCATENATION_OPTIONS:
        if hasattr(config, option):
            setattr(config, option, 0)
    ir.is_cpu = lambda x: ir.get_device_type(x) in ("cpu", NAME)  # decides which values are computed once
    lowering.use_two_step_variance = _with_limit_of_the_cpu(lowering.use_two_step_variance)
    lowering.register_lowering([torch.ops.prims.div], broadcast=True)(_quotient)
    register_interface_for_device(NAME, Interface)
    register_device_op_overrides(NAME, Lines())
    register_backend_for_device(NAME, CppScheduling, Wrapper)


def _with_limit_of_the_cpu(uses_two_steps: Any) -> Any:
    """Return the function that chooses the formula of a variance, with the limit that it has for the CPU."""

    def choose(*args: Any, **options: Any) -> bool:
        with config.patch(unroll_reductions_threshold=config.cpp.use_two_step_variance_threshold):
            return uses_two_steps(*args, **options)

    return choose


def _quotient(x: Any, y: Any) -> Any:
    """Return the quotient. For devices other than the CPU, Inductor would multiply by the reciprocal of a constant."""
    integral = all(lowering.is_boolean_type(each) or lowering.is_integer_type(each) for each in (x, y))
    return lowering.truncdiv(x, y) if integral else lowering.make_pointwise(virtualized.ops.truediv)(x, y)
