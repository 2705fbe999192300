"""Training programs whose steps make other calls on the test device than on the CPU.

Four ranks make a few steps of each program. Calls of the last step are compared: kind, group, dtype and shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import meshwright as mw
from meshwright.comm import CommCall, current_communicator
from tests.device.backend import register, register_kernels
from tests.device.communicator import run_on_devices

from ._race_programs import COMPILED, KINDS, SMALL, Case
from ._virtual_steps import buckets_of

RANKS, STEPS = 4, 3
MESHES = ("dp x tp", "dp x cp", "dp x ep")
CASES = (
    *(Case(kind) for kind in (*KINDS, *MESHES)),
    *(Case(kind, bucket=SMALL) for kind in ("dp", "dp x tp")),
    *(Case(kind, True) for kind in (*KINDS, "pp x dp")),
    *(Case(kind, True, COMPILED) for kind in ("dp", "tp", "ZeRO-3")),
)
QUICK = (Case("dp"), Case("ZeRO-3"), Case("tp", True), Case("pp", True))
Calls = Counter[CommCall]


def calls_of(case: Case, on_devices: bool) -> list[Calls]:
    """Return the calls that each rank makes in the last step."""

    def program(device: torch.device | str) -> Calls:
        training = case.training(torch.device(device))
        for _ in range(STEPS - 1):
            training.step()
        with current_communicator().seen.record_calls() as calls:
            training.step()
        return Counter(calls)

    run: Callable[[], Calls] = run_on_devices(program) if on_devices else lambda: program("cpu")
    return mw.simulate(run, RANKS)


def differences(cpu: list[Calls], device: list[Calls]) -> list[str]:
    """Return a line for each call that a rank makes only on one of them, or more often."""
    lines: list[str] = []
    for rank, (expected, found) in enumerate(zip(cpu, device, strict=True)):
        lines += [f"rank {rank}: only on the device: {call}" for call in (found - expected).elements()]
        lines += [f"rank {rank}: only on the CPU: {call}" for call in (expected - found).elements()]
    return lines


def _counts(calls: Calls) -> dict[str, int]:
    """Return the number of calls by kind."""
    return dict(Counter(call.kind for call in calls.elements()))


def run(quick: bool = False) -> dict[str, Any]:
    register()
    cases = QUICK if quick else CASES
    if any(case.is_compiled for case in cases):
        register_kernels()
    different: dict[str, list[str]] = {}
    counts: dict[str, dict[str, int]] = {}
    for case in cases:
        with buckets_of(case.bucket):
            cpu, device = (calls_of(case, on_devices) for on_devices in (False, True))
        different[str(case)] = differences(cpu, device)
        counts[str(case)] = _counts(device[0])
    different = {name: lines for name, lines in different.items() if lines}
    return {
        "value": f"{len(different)} of {len(cases)}",
        "goal": "0: the same calls on each rank",
        "ok": not different,
        "details": {"calls of a step of rank 0": counts, "different": different},
    }
