"""Part of `gpu`: rates of products, bandwidth of copies, latency of operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._gpu_device import Setting, attempt, in_turns_ms, main_of

DTYPES = {"f32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def rates(setting: Setting) -> dict[str, Any]:
    """Return operations, bytes and seconds."""
    sizes = (1024, 4096, 8192) if setting.is_large else (128, 256)
    return {
        "TFLOP/s": {kind: attempt(lambda k=kind: products(k, sizes, setting)) for kind in (*DTYPES, "fp8")},
        "GB/s": {
            kind: attempt(lambda k=kind: copies(k, setting)) for kind in ("device", "to device", "from device", "paged")
        },
        "us": latencies(setting),
    }


def products(kind: str, sizes: tuple[int, ...], setting: Setting) -> dict[str, float]:
    """Return 10^12 operations per second of square products of random numbers, by size."""
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    calls = {str(size): _fp8(size, setting) if kind == "fp8" else _product(kind, size, setting) for size in sizes}
    ms = in_turns_ms(calls, setting)
    return {size: round(2 * int(size) ** 3 / (t * 1e-3) / 1e12, 4) for size, t in ms.items()}


def _product(kind: str, size: int, setting: Setting) -> Callable[[], Tensor]:
    a, b = (torch.randn(size, size, device=setting.device, dtype=DTYPES[kind]) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _fp8(size: int, setting: Setting) -> Callable[[], Tensor]:
    a, b = (torch.randn(size, size, device=setting.device).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device=setting.device)
    return lambda: torch._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.bfloat16)


def copies(kind: str, setting: Setting) -> float:
    """Return 10^9 bytes per second; copies inside the device count what they read and what they write."""
    count = 2**28 if setting.is_large else 2**22
    x = torch.randn(count, device=setting.device)
    if kind == "device":
        y = torch.empty_like(x)
        return _gigabytes(2 * x.nbytes, lambda: y.copy_(x), setting)
    host = torch.empty(count, pin_memory=kind != "paged" and setting.device.type != "cpu")
    if kind == "to device":
        return _gigabytes(x.nbytes, lambda: x.copy_(host, non_blocking=True), setting)
    return _gigabytes(x.nbytes, lambda: host.copy_(x, non_blocking=True), setting)


def _gigabytes(nbytes: int, copy: Callable[[], Tensor], setting: Setting) -> float:
    return round(nbytes / in_turns_ms({"copy": copy}, setting)["copy"] / 1e6, 2)


def latencies(setting: Setting) -> dict[str, float]:
    """Return microseconds of one small operator: in a row of many, and with a wait for its result."""
    x = torch.ones(8, device=setting.device)
    calls: dict[str, Callable[[], object]] = {"queued": lambda: x.add_(1.0), "with its result": lambda: x.sum().item()}
    return {name: round(t * 1e3, 2) for name, t in in_turns_ms(calls, setting).items()}


if __name__ == "__main__":
    main_of(rates)
