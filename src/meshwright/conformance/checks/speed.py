"""Level 5: measured speeds, for people to judge; no number is wrong.

These are first numbers: products by dtype, memory bandwidth, the time of a small operator, and an all-reduce. They are
not compared with a table of devices, and overlap is not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch

from meshwright.comm import current_communicator, simulate
from meshwright.engine import shard_tensor
from meshwright.layout import ProcessMesh, Replicate

from ..results.check import Check, NotRun, Target

SECONDS = 0.2
"""Most time of a measurement whose calls are short."""
LARGEST, ENOUGH = 8192, 2e-3
"""Largest matrix; and the seconds of a product after which no larger one is measured."""


def seconds_of(work: Callable[[], object], target: Target) -> float:
    """Return the mean duration of a call, with the time until the device has finished."""

    def finish() -> None:
        torch.ones(1, device=target.device).cpu()

    work()
    finish()
    calls, seconds = 1, 0.0
    while True:
        start = perf_counter()
        for _ in range(calls):
            work()
        finish()
        seconds = perf_counter() - start
        if seconds > SECONDS / 2:
            return seconds / calls
        calls *= 2


def products(dtype: torch.dtype, target: Target) -> str:
    if dtype not in target.dtypes:
        raise NotRun(f"the device has no {dtype}")
    best, size = "", 128
    while size <= LARGEST:
        x = torch.ones(size, size, device=target.device, dtype=dtype)
        seconds = seconds_of(partial(torch.matmul, x, x), target)
        best = f"{2 * size**3 / seconds / 1e12:.3g} TFLOP/s, {size} x {size}"
        if seconds > ENOUGH:
            break
        size *= 2
    return best


def memory_bandwidth(target: Target) -> str:
    x = torch.ones(2**22, device=target.device)
    y = torch.empty_like(x)
    return f"{2 * x.nbytes / seconds_of(lambda: y.copy_(x), target) / 1e9:.3g} GB/s, copies of 16 MiB"


def operator_overhead(target: Target) -> str:
    x = torch.ones(8, device=target.device)
    plain = seconds_of(lambda: x + x, target)

    def marked_seconds() -> float:
        y = shard_tensor(x, ProcessMesh([0], ["x"]), [Replicate()])
        return seconds_of(lambda: y + y, target)

    (marked,) = simulate(marked_seconds, 1)
    return f"{plain * 1e6:.3g} µs for a small operator, {marked * 1e6:.3g} µs for one of a distributed tensor"


def all_reduce(target: Target) -> str:
    ranks = current_communicator()
    texts: list[str] = []
    for count in (2, 2**20):
        x = torch.ones(count, device=target.device)
        ranks.barrier((0, 1))
        start = perf_counter()
        for _ in range(20):
            ranks.all_reduce(x, "sum", (0, 1))
        torch.ones(1, device=target.device).cpu()
        texts.append(f"{(perf_counter() - start) / 20 * 1e6:.0f} µs for {x.nbytes} bytes")
    return ", ".join(texts)


_PRODUCTS = (torch.float32, torch.bfloat16, torch.float16)
SPEED = (
    *(Check(5, f"product in {str(each).removeprefix('torch.')}", partial(products, each)) for each in _PRODUCTS),
    Check(5, "memory bandwidth", memory_bandwidth),
    Check(5, "time of one operator", operator_overhead),
    Check(5, "all-reduce of two processes", all_reduce, 2),
)
