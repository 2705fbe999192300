"""Platforms: the properties of types of devices, and the built-in platforms.

This is the only file that names CUDA and NCCL as torch does. All other code asks a `Platform` or `torch.accelerator`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from ._errors import PlatformError
from ._untyped import TorchValue

CPU = "cpu"
PlacedMessage = tuple[int, int, Tensor]
"""The other rank's place in the group, the tag, and the tensor of a message."""


class Transport(Protocol):
    """Communication between the ranks of one group; a platform opens one for each group.

    Ranks are named by their place in the group. All ranks make the same calls in the same order. Tensors are
    contiguous, and of equal sizes on all ranks unless lengths are given. When a method returns, its results are
    complete or queued on the current stream.
    """

    def all_reduce(self, out: Tensor, x: Tensor, op: str) -> None:
        """Write the reduction of every rank's `x` to `out`, which is `x` itself or has other memory."""
        ...

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Write every rank's flat `x` to `out`, one after the other."""
        ...

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        """Write the sum over the group of the caller's part of the flat `x` to `out`."""
        ...

    def all_to_all(self, out: Tensor, x: Tensor, arriving: list[int], leaving: list[int]) -> None:
        """Write every rank's piece for the caller to `out`; the lengths are those of the pieces in `out` and `x`."""
        ...

    def broadcast(self, x: Tensor, place: int) -> None:
        """Write the `x` of the rank at this place to every rank's `x`."""
        ...

    def exchange(self, sends: Sequence[PlacedMessage], receives: Sequence[PlacedMessage]) -> None:
        """Send and receive all messages together, in the order of their tags; either list may be empty."""
        ...

    def barrier(self) -> None:
        """Return once every rank of the group has called it."""
        ...


@dataclass(frozen=True, slots=True)
class TransportGroup:
    """A group of ranks that opens a transport: the caller's place, the number of ranks, and the limit of a call.

    `store` is a `torch.distributed.Store` of this group alone: `set(key, value)`, and `get(key)`, which waits for it.
    """

    place: int
    size: int
    store: TorchValue
    limit: timedelta


class HostSignal(Protocol):
    """A number that the host raises, for which streams of a device wait."""

    def wait(self, stream: torch.Stream, number: int) -> None:
        """Make the stream wait until the number is reached; the host goes on."""
        ...

    def reach(self, number: int) -> None:
        """Let streams go on that wait for this number or a lower one. Any thread calls this, in ascending order."""
        ...


class _CudaSignal:
    """A signal in pinned memory, which streams read by a function of the driver.

    Raises OSError or AttributeError without such a driver.
    """

    def __init__(self) -> None:
        self._number = torch.zeros(1, dtype=torch.int32, device=CPU, pin_memory=True)
        self._wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2

    def wait(self, stream: torch.Stream, number: int) -> None:
        same = torch.cuda.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
        handle, address = ctypes.c_void_p(same.cuda_stream), ctypes.c_uint64(self._number.data_ptr())
        failed = self._wait(handle, address, ctypes.c_uint32(number), ctypes.c_uint(0))  # 0: at least the number
        if failed:
            raise RuntimeError(f"cuStreamWaitValue32 failed with error {failed} of the CUDA driver")

    def reach(self, number: int) -> None:
        self._number.fill_(number)


def _cuda_signal(device: torch.device) -> HostSignal | None:
    """Return a signal for a GPU; None if its driver has no waits for memory, or refuses them."""
    try:
        signal = _CudaSignal()
        signal.wait(torch.accelerator.current_stream(device), 0)  # the number from the start
    except (OSError, AttributeError, RuntimeError):
        return None
    return signal


FLASH = "flash"
"""The fused kernel of attention for 16-bit numbers."""
EFFICIENT = "efficient"
"""The fused kernel of attention for masks and 32-bit numbers."""
FLASH_ON_CPU = "flash on the CPU"
"""The fused kernel of attention of the CPU."""


def no_attention(_: torch.device) -> frozenset[str]:
    """Return the fused kernels of attention of a device for which torch has none."""
    return frozenset()


def _attention_of_cuda(device: torch.device) -> frozenset[str]:
    """Return the kernels of a GPU. A torch without CUDA records programs for devices that have all of them."""
    has_flash = not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)
    return frozenset({EFFICIENT, FLASH} if has_flash else {EFFICIENT})


TENSORWISE = "tensorwise"
"""Scales of a product of float8 matrices: one for each matrix."""
ROWWISE = "rowwise"
"""Scales of a product of float8 matrices: one for each row of the first, and one for each column of the second."""


def no_float8(_: torch.device) -> frozenset[str]:
    """Return the scales of float8 products of a device whose `torch._scaled_mm` is missing or slow."""
    return frozenset()


def _float8_of_cuda(device: torch.device) -> frozenset[str]:
    """Return the scales with which `torch._scaled_mm` of a GPU multiplies; ROCm has other float8 numbers."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return frozenset()
    since = {TENSORWISE: (8, 9), ROWWISE: (9, 0)}
    return frozenset(name for name, version in since.items() if torch.cuda.get_device_capability(device) >= version)


_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
USUAL_REDUCTIONS: Mapping[str, Collection[torch.dtype]] = {
    "sum": (*_FLOATS, *_INTEGERS),
    "prod": (*_FLOATS, *_INTEGERS),
    "max": _INTEGERS,
    "min": _INTEGERS,
}
"""The reductions that Gloo and NCCL compute exactly; they lose NaN in a maximum or minimum of floats."""


def module_state(device: torch.device) -> Tensor:
    """Return the state of the device's default generator, by the function of torch's module for the type."""
    return torch.get_device_module(device.type).get_rng_state(device)


def set_module_state(state: Tensor, device: torch.device) -> None:
    """Set the state of the device's default generator, by the function of torch's module for the type."""
    torch.get_device_module(device.type).set_rng_state(state, device)


_TYPE = re.compile(r"[a-z_][a-z0-9_]*")
REDUCTIONS = ("sum", "prod", "max", "min")
TRANSPORT_METHODS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "exchange",
    "barrier",
)


def _check_device_type(found: object) -> None:
    """Raise PlatformError unless this is the name of a type of devices, without an index."""
    if not (isinstance(found, str) and _TYPE.fullmatch(found)):
        why = "a platform is for all devices of a type, by torch's name for the type"
        raise _field_error("device_type", found, why, 'write the name of the type, such as "xpu"')


def _check_transport(found: object) -> None:
    """Raise PlatformError unless this opens transports, names a backend of torch, or is None."""
    if not (found is None or isinstance(found, str) or callable(found)):
        fix = "give a function that takes a TransportGroup, or the name of a backend of torch.distributed"
        raise _field_error("transport", found, "Meshwright opens a transport for each group of ranks", fix)


def _check_reductions(found: object) -> None:
    """Raise PlatformError unless this is a mapping of reductions to dtypes."""
    if not (isinstance(found, Mapping) and all(map(_is_reduction, found.items()))):
        fix = 'write dtypes for reductions, such as {"sum": (torch.float32,)}'
        raise _field_error("reductions", found, f"the reductions are {', '.join(REDUCTIONS)}", fix)


def _is_reduction(entry: tuple[object, object]) -> bool:
    name, dtypes = entry
    return name in REDUCTIONS and isinstance(dtypes, Collection) and all(isinstance(x, torch.dtype) for x in dtypes)


def _check_operators(found: object) -> None:
    """Raise PlatformError unless this is a set of names of operators."""
    if not (isinstance(found, frozenset) and all(isinstance(name, str) for name in found)):
        fix = 'write the names in a frozenset, such as frozenset({"aten.index_add"})'
        raise _field_error("nondeterministic", found, "the field is a frozenset of names of operators", fix)


def _check_function(field: str, found: object) -> None:
    """Raise PlatformError unless a field is a function."""
    if not callable(found):
        why = "Meshwright calls this field for a device"
        raise _field_error(field, found, why, "give a function, or leave the field out")


def check_transport_methods(transport: object) -> None:
    """Raise PlatformError if an opened transport lacks a method."""
    missing = [name for name in TRANSPORT_METHODS if not callable(getattr(transport, name, None))]
    if missing:
        raise PlatformError(
            f"the transport {type(transport).__name__} of a group of ranks",
            f"no method {', '.join(missing)}",
            f"a transport has the methods {', '.join(TRANSPORT_METHODS)}",
            "add the missing methods, or correct their names",
        )


def _field_error(field: str, found: object, why: str, fix: str) -> PlatformError:
    return PlatformError(f"the field {field} of a platform", f"{found!r}", why, fix)


@dataclass(frozen=True, slots=True)
class Platform:
    """One type of device: its properties that `torch.accelerator` does not have.

    The defaults are those of a usual accelerator, so a platform states only what is different.

    Args:
        device_type: name of the type in torch, such as "xpu".
        transport: function that opens the `Transport` of a group, or the name of a backend of `torch.distributed`; by
            default the backend that torch has for the type.
        reductions: name of a reduction ("sum", "prod", "max", "min") → dtypes for which the transport is exact. For
            other dtypes, Meshwright gathers the values and reduces them on the device.
        has_streams: True if calls are queued on streams. Otherwise, work is complete when a call returns.
        generator_state: function that returns the state of the default generator of a device.
        set_generator_state: function that sets this state.
        counts_memory: True if `torch.accelerator` has the statistics of allocated memory.
        pins_memory: True if memory of the host can be pinned, so that copies need no wait.
        signal: function that makes a `HostSignal` of a device, or returns None if the device cannot wait for one.
            Without a signal, the host waits for messages of pipelines.
        autocast_dtypes: dtypes of `torch.autocast`.
        product_dtypes: dtypes of matrix products that `meshwright profile` measures.
        asserts: True if torch always has the kernel of `torch.ops.aten._assert_async` for the type. Programs that are
            recorded without such a device then check indices, too.
        attention: function that returns which fused kernels of attention a device has: "flash" (16-bit
            numbers), "efficient" (masks and 32-bit numbers). Ring attention merges their results. Without such a
            kernel it uses plain operators.
        float8: function that returns the scales with which `torch._scaled_mm` of a device multiplies float8 numbers:
            "tensorwise", "rowwise". Products with other scales are emulated in float32.
        nondeterministic: names of operators, such as "aten.index_add", that may give other bits when repeated.

    Raises:
        PlatformError: a field has a value that it cannot have.

    `Transport`, `TransportGroup` and `HostSignal` are protocols and types of `meshwright.layout`.
    """

    device_type: str
    transport: str | Callable[[TransportGroup], Transport] | None = None
    reductions: Mapping[str, Collection[torch.dtype]] = field(
        default_factory=lambda: USUAL_REDUCTIONS, repr=False, hash=False
    )
    has_streams: bool = True
    generator_state: Callable[[torch.device], Tensor] = field(default=module_state, repr=False)
    set_generator_state: Callable[[Tensor, torch.device], object] = field(default=set_module_state, repr=False)
    counts_memory: bool = True
    pins_memory: bool = True
    signal: Callable[[torch.device], HostSignal | None] | None = field(default=None, repr=False)
    autocast_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    product_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    asserts: bool = False
    attention: Callable[[torch.device], frozenset[str]] = field(default=no_attention, repr=False)
    float8: Callable[[torch.device], frozenset[str]] = field(default=no_float8, repr=False)
    nondeterministic: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        _check_device_type(self.device_type)
        _check_transport(self.transport)
        _check_reductions(self.reductions)
        _check_operators(self.nondeterministic)
        for field_name in ("generator_state", "set_generator_state", "attention", "float8"):
            _check_function(field_name, getattr(self, field_name))
        if self.signal is not None:
            _check_function("signal", self.signal)


_ATOMIC = frozenset(
    f"aten.{name}"
    for name in (
        *("bincount", "convolution_backward", "cumsum", "embedding_bag", "histc", "index_add", "index_put"),
        *("kthvalue", "put", "scatter_add", "scatter_reduce"),
    )
)
"""Operators of CUDA that add with atomics or choose algorithms by time (`torch.use_deterministic_algorithms`)."""

BUILT_IN = (
    Platform(
        CPU,
        transport="gloo",
        has_streams=False,
        generator_state=lambda _: torch.default_generator.get_state(),
        set_generator_state=lambda state, _: torch.default_generator.set_state(state),
        counts_memory=False,
        pins_memory=False,
        asserts=True,
        attention=lambda _: frozenset({FLASH_ON_CPU}),
        product_dtypes=(torch.float32, torch.float64, torch.bfloat16),
    ),
    Platform(
        "cuda",  # ROCm too, by torch's names
        transport="nccl",
        signal=None if torch.version.hip else _cuda_signal,
        asserts=True,
        attention=_attention_of_cuda,
        float8=_float8_of_cuda,
        nondeterministic=_ATOMIC,
    ),
    Platform("xpu", transport="xccl"),
    Platform("npu", transport="hccl", counts_memory=False),  # `torch_npu` registers the type and HCCL
    Platform(
        "mps",  # one device, so there is no transport to name
        has_streams=False,
        generator_state=lambda _: torch.mps.get_rng_state(),
        set_generator_state=lambda state, _: torch.mps.set_rng_state(state),
        counts_memory=False,
        pins_memory=False,
    ),
)
