"""A backend of Inductor for the test devices: the kernels, the memory plan and the bits of programs for the CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._dynamo.device_interface import CpuInterface, register_interface_for_device
from torch._inductor import config, ir, lowering, virtualized
from torch._inductor.codegen.common import DeviceOpOverrides, register_backend_for_device, register_device_op_overrides
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen

from .backend import NAME
from .kernels import call_kernel

_GPU_OPTIONS = ("loop_ordering_after_fusion", "loop_reindexing_after_fusion", "loop_index_inversion_in_fusion")
"""Options that Inductor ignores for the CPU, because its kernels for the CPU do not support them."""


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
