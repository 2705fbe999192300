"""Level 5: measured speeds, for people to judge; no number is wrong.

For a device in the hardware table, rates are also shares of the table's values: of the vendor's peak for products and
copies, and of the bandwidth of the usual link inside a node for collectives. Other devices have numbers only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch

from meshwright.comm import current_communicator, simulate
from meshwright.cost import Cluster, cluster_of, name_of_device
from meshwright.engine import shard_tensor
from meshwright.layout import CPU, ProcessMesh, Replicate, device_name, parse_spec
from meshwright.reshard import plan

from ..results.check import Check, NotRun, Target
from ..results.uses import FOUR_PROCESSES, PROCESSES

SECONDS = 0.2
"""Most time of a measurement whose calls are short."""
LARGEST, ENOUGH = 8192, 2e-3
"""Largest matrix; and the seconds of a product after which no larger one is measured."""
COPIED, COPIED_ON_CPU = 2**28, 2**24
"""Bytes of a copy: more than the caches of an accelerator hold."""
TIMES = 5
"""Calls of a measurement in which several ranks take part."""


def known_cluster(target: Target) -> Cluster | None:
    """Return the usual cluster of the device; None if the hardware table does not have the device."""
    name = name_of_device(device_name(target.device) or "")
    return None if name is None else cluster_of(name)


def share_text(found: float, of: float, what: str) -> str:
    """Return the text about a rate as a share of a value of the hardware table.

    >>> share_text(600e12, 990e12, "peak")
    ': 61 % of the peak in the table'
    """
    return f": {100 * found / of:.0f} % of the {what} in the table"


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
    best, rate, size = "", 0.0, 128
    while size <= LARGEST:
        x = torch.ones(size, size, device=target.device, dtype=dtype)
        seconds = seconds_of(partial(torch.matmul, x, x), target)
        rate = 2 * size**3 / seconds
        best = f"{rate / 1e12:.3g} TFLOP/s, {size} x {size}"
        if seconds > ENOUGH:
            break
        size *= 2
    known = known_cluster(target)
    return best if known is None else best + share_text(rate, known.device.peak(dtype), "peak")


def memory_bandwidth(target: Target) -> str:
    x = torch.ones((COPIED_ON_CPU if target.device.type == CPU else COPIED) // 4, device=target.device)
    y = torch.empty_like(x)
    rate = 2 * x.nbytes / seconds_of(lambda: y.copy_(x), target)
    text = f"{rate / 1e9:.3g} GB/s, copies of {x.nbytes // 2**20} MiB"
    known = known_cluster(target)
    return text if known is None else text + share_text(rate, known.device.bandwidth, "bandwidth")


def operator_overhead(target: Target) -> str:
    x = torch.ones(8, device=target.device)
    plain = seconds_of(lambda: x + x, target)

    def marked_seconds() -> float:
        y = shard_tensor(x, ProcessMesh([0], ["x"]), [Replicate()])
        return seconds_of(lambda: y + y, target)

    (marked,) = simulate(marked_seconds, 1)
    return f"{plain * 1e6:.3g} µs for a small operator, {marked * 1e6:.3g} µs for one of a distributed tensor"


def steady_seconds(work: Callable[[], object], target: Target) -> float:
    """Return the mean duration of a call that all ranks make equally often."""
    ranks = current_communicator()
    work()
    torch.ones(1, device=target.device).cpu()
    ranks.barrier(tuple(range(ranks.size)))
    start = perf_counter()
    for _ in range(TIMES):
        work()
    torch.ones(1, device=target.device).cpu()
    return (perf_counter() - start) / TIMES


def all_reduce(target: Target) -> str:
    """Return the time of a short all-reduce, and the bytes per second that each rank sends in a long one."""
    ranks = current_communicator()
    group = tuple(range(ranks.size))
    short, long = (torch.ones(count, device=target.device) for count in (2, _long(target)))
    latency, seconds = (steady_seconds(partial(ranks.all_reduce, x, "sum", group), target) for x in (short, long))
    rate = 2 * (ranks.size - 1) / ranks.size * long.nbytes / seconds
    text = f"{latency * 1e6:.0f} µs for {short.nbytes} bytes, {rate / 1e9:.3g} GB/s for {long.nbytes // 2**20} MiB"
    known = known_cluster(target)
    if known is None or target.through_host:
        return text
    return text + share_text(rate, known.inside.bandwidth, f"bandwidth of {known.inside.name}")


def _long(target: Target) -> int:
    """Return the number of elements of a long message: 64 MiB, or 4 MiB if these take more than a millisecond."""
    ranks, x = current_communicator(), torch.ones(2**20, device=target.device)
    group = tuple(range(ranks.size))
    seconds = steady_seconds(partial(ranks.all_reduce, x, "sum", group), target)
    slowest = ranks.all_reduce(torch.tensor(seconds, device=target.device), "max", group).item()
    return 2**24 if slowest < 1e-3 else 2**20


def overlap(target: Target) -> str:
    """Return the share of a reduction that runs beside products of about the same duration."""
    ranks = current_communicator()
    group = tuple(range(ranks.size))
    mesh, size = ProcessMesh(group, ["x"]), _long(target)
    steps = plan(parse_spec(f"f32[{size}] +x", mesh), parse_spec(f"f32[{size}]", mesh))
    x, a = torch.ones(size, device=target.device), torch.ones(1024, 1024, device=target.device)
    alone = steady_seconds(lambda: ranks.start(steps, x).wait(), target)
    product = steady_seconds(lambda: torch.mm(a, a), target)
    wanted = torch.tensor(max(1.0, alone / product), device=target.device)
    count = int(ranks.all_reduce(wanted, "max", group).item())

    def products() -> None:
        for _ in range(count):
            torch.mm(a, a)

    def both() -> None:
        started = ranks.start(steps, x)
        products()
        started.wait()

    computed, together = steady_seconds(products, target), steady_seconds(both, target)
    hidden = (alone + computed - together) / min(alone, computed)
    told = f"{alone * 1e3:.3g} ms of reduction and {computed * 1e3:.3g} ms of products in {together * 1e3:.3g} ms"
    return f"{100 * min(max(hidden, 0.0), 1.0):.0f} % of the shorter part is hidden: {told}"


_PRODUCTS = (torch.float32, torch.bfloat16, torch.float16)
SPEED = (
    *(Check(5, f"product in {str(each).removeprefix('torch.')}", partial(products, each)) for each in _PRODUCTS),
    Check(5, "memory bandwidth", memory_bandwidth),
    Check(5, "time of one operator", operator_overhead),
    Check(5, f"all-reduce of {PROCESSES}", all_reduce, 2),
    Check(5, f"overlap of {PROCESSES}", overlap, 2),
    Check(5, f"all-reduce of {FOUR_PROCESSES}", all_reduce, 4),
    Check(5, f"overlap of {FOUR_PROCESSES}", overlap, 4),
)
