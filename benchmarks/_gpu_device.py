"""The device of the parts of `gpu`: options of a part, timing that waits for the device, peak memory."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from statistics import median
from typing import Any

import torch

SECONDS = 0.02
"""Least duration of a block of calls."""
LARGE = {"cuda", "xpu", "npu"}
"""Types of devices that measure the full sizes."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The device that a part measures. `quick` asks for fewer cases; `is_large` is False where sizes must be small."""

    device: torch.device
    quick: bool

    @property
    def is_large(self) -> bool:
        return self.device.type in LARGE

    def finish(self) -> None:
        """Wait until the device has finished its work."""
        torch.ones(1, device=self.device).cpu()

    def reset_peak(self) -> None:
        """Start a new measurement of peak memory."""
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        """Return the peak memory since the last reset in GiB, or None on the CPU."""
        if self.device.type == "cpu":
            return None
        return round(torch.accelerator.max_memory_allocated() / 2**30, 3)


def main_of(part: Callable[[Setting], dict[str, Any]]) -> None:
    """Run a part as a program: `python -m benchmarks._gpu_PART --device TYPE [--quick]`; print its JSON object last."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if given.device == "mesh":
        import_module("tests.device.registered")
        import_module("tests.device.backend").register_kernels()
    print(json.dumps(part(Setting(torch.device(given.device), given.quick))))


def attempt(work: Callable[[], Any]) -> Any:
    """Return the result, or the error as a text: a contender that fails costs only itself."""
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


def in_turns_ms(calls: Mapping[str, Callable[[], Any]], setting: Setting, turns: int = 7) -> dict[str, float]:
    """Return milliseconds of one call of each function, with its work on the device: the median of the turns."""
    counts = {name: _calls_in_block(call, setting) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            found[name].append(_seconds(call, counts[name], setting) * 1e3)
    return {name: round(median(times), 4) for name, times in found.items()}


def _calls_in_block(call: Callable[[], Any], setting: Setting) -> int:
    _seconds(call, 3, setting)
    return max(1, min(1000, round(SECONDS / _seconds(call, 2, setting))))


def _seconds(call: Callable[[], Any], count: int, setting: Setting) -> float:
    setting.finish()
    start = time.perf_counter()
    for _ in range(count):
        call()
    setting.finish()
    return (time.perf_counter() - start) / count


def ratios(ms: Mapping[str, float], base: str) -> dict[str, float]:
    """Return the time of each function divided by that of `base`.

    >>> ratios({"eager": 3.0, "ours": 2.0}, "ours")
    {'eager': 1.5}
    """
    return {name: round(t / ms[base], 3) for name, t in ms.items() if name != base}
