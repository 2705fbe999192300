"""One rank of `meshwright profile`: all ranks measure at once, as in training; rank 0 writes its result.

`python -m meshwright.cli.ranks.measure FILE SECONDS` runs a rank.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.comm import Communicator, init_process
from meshwright.layout import CPU, device_name, device_types, platform_of, write_dtype
from meshwright.search import progress_bar


class Sizes(NamedTuple):
    """The sizes of matrix products, and the bytes of a copy."""

    products: tuple[int, ...]
    copied: int


ON_CPU, ON_ACCELERATORS = Sizes((256, 512, 1024), 2**26), Sizes((1024, 4096, 8192), 2**30)
MESSAGES = (4, 2**12, 2**16, 2**20, 2**24)
FEWEST = 3
_TIMES = 20

Measurement = tuple[str, str, int]
"""The kind of a measurement, its dtype, and its size."""


def sizes_for(device: str) -> Sizes:
    """Return the sizes that are measured on a type of device."""
    return ON_CPU if device == CPU else ON_ACCELERATORS


def measurements(ranks: int, device: str) -> list[Measurement]:
    """Return the measurements in order; equal on every rank."""
    dtypes = map(write_dtype, platform_of(device).product_dtypes)
    products = [("product", dtype, size) for dtype in dtypes for size in sizes_for(device).products]
    messages = [("all-reduce", "f32", nbytes) for nbytes in MESSAGES] if ranks > 1 else []
    return [*products, ("copy", "f32", sizes_for(device).copied), ("overhead", "f32", 1), *messages]


def measure(here: Communicator, seconds: float, device: torch.device) -> dict[str, Any]:
    """Return every measurement on this rank, and the rates computed from them."""
    group, found = tuple(range(here.size)), list[dict[str, Any]]()
    asked = measurements(here.size, device.type)
    with progress_bar("measuring", silent=here.rank != 0) as on_step:
        for at, (what, dtype, size) in enumerate(asked):
            on_step(at, len(asked))
            act = _action(what, dtype, size, here, device)
            here.barrier(group)
            took = _seconds(act, seconds, device, steady=what == "all-reduce")
            found.append({"what": what, "dtype": dtype, "size": size, "seconds": took})
    return {
        "ranks": here.size,
        "name": _name(device),
        "torch": torch.__version__,
        "measurements": found,
        "device": {**rates(found), "memory": _memory(device, here.size)},
        **_link(found, here.size),
    }


def _action(what: str, dtype: str, size: int, here: Communicator, device: torch.device) -> Callable[[], object]:
    """Return the function that is timed."""
    if what == "product":
        kind = next(d for d in platform_of(device).product_dtypes if write_dtype(d) == dtype)
        a, b = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)
    x = torch.zeros(max(1, size // 4), device=device)
    if what == "all-reduce":
        return lambda: here.all_reduce(x, "sum", tuple(range(here.size)))
    y: Tensor = torch.empty_like(x)
    return (lambda: y.copy_(x)) if what == "copy" else (lambda: x.add_(1.0))


def _seconds(act: Callable[[], object], budget: float, device: torch.device, steady: bool) -> float:
    """Return the seconds of one run, as the median of five blocks.

    `steady` runs are equally many on every rank, because they communicate.
    """
    _timed(act, 1, device)
    once = _timed(act, FEWEST, device)
    runs = _TIMES if steady else max(1, min(1000, int(budget / 5 / max(once, 1e-7))))
    blocks = sorted(_timed(act, runs, device) for _ in range(5))
    return blocks[len(blocks) // 2]


def _timed(act: Callable[[], object], runs: int, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(runs):
        act()
    _wait(device)
    return (time.perf_counter() - start) / runs


def _wait(device: torch.device) -> None:
    if device.type != CPU:
        torch.accelerator.synchronize(device)


def rates(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return operations and bytes per second, and the seconds until an operator begins.

    >>> rates([{"what": "product", "dtype": "f32", "size": 100, "seconds": 1e-3},
    ...        {"what": "copy", "dtype": "f32", "size": 1000, "seconds": 1e-6},
    ...        {"what": "overhead", "dtype": "f32", "size": 1, "seconds": 2e-6}])
    {'flops': {'f32': 2000000000.0}, 'bandwidth': 2000000000.0, 'overhead': 2e-06}
    """
    flops: dict[str, float] = {}
    for m in found:
        if m["what"] == "product":
            flops[m["dtype"]] = max(flops.get(m["dtype"], 0.0), 2 * m["size"] ** 3 / m["seconds"])
    copied = next(m for m in found if m["what"] == "copy")
    overhead = next(m["seconds"] for m in found if m["what"] == "overhead")
    return {"flops": flops, "bandwidth": 2 * copied["size"] / copied["seconds"], "overhead": overhead}


def _link(found: list[dict[str, Any]], ranks: int) -> dict[str, Any]:
    """Return the latency and bandwidth of the link: the shortest all-reduce, and the extra time of the longest."""
    reduced = [m for m in found if m["what"] == "all-reduce"]
    if not reduced:
        return {}
    small, large = reduced[0], reduced[-1]
    moved = 2 * large["size"] * (ranks - 1) / ranks
    return {
        "inside": {
            "start": small["seconds"],
            "bandwidth": moved / max(large["seconds"] - small["seconds"], 1e-9),
        }
    }


def _memory(device: torch.device, ranks: int) -> float:
    """Return the bytes of memory of a rank: those of its device if torch knows them, or its share of the host's."""
    if device.type != CPU:
        with suppress(NotImplementedError):  # some devices have no such function
            return float(torch.accelerator.get_memory_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks


def _name(device: torch.device) -> str:
    if device.type != CPU:
        return device_name(device) or device.type
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"a core of {model or platform.machine()}"


if __name__ == "__main__":
    communicator, kind = init_process(), device_types()[-1]
    here = torch.device(kind) if kind == CPU else torch.device(kind, torch.accelerator.current_device_index())
    told = measure(communicator, float(sys.argv[2]), here)
    if communicator.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(told))
