"""Training steps on the test device: programs with other bits than on the CPU, races, and waits that nothing needs.

Each program runs on the CPU, on four test devices, and once more there with every conversion finished at its start.
Attention is computed by plain operators, since the fused kernel of the CPU adds up in another order.
Then each wait of a step is left out in a step of its own. If its absence is not a race, another wait must cover it: a
step without the other waits for results has more races if this one is missing too.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.comm import Communicator
from meshwright.comm.communicators.queued_communicator import QueuedCommunicator
from tests.device.backend import register_kernels
from tests.device.inspection import Devices

from ._left_out_waits import LeftOut, left_out_waits
from ._race_programs import CASES, QUICK, Case
from ._virtual_steps import buckets_of

PROGRAMS_GOAL, WAITS_GOAL = 40, 30


@contextmanager
def finished_conversions() -> Generator[None]:
    """Finish each conversion at its start, inside the block."""
    before = QueuedCommunicator.start
    QueuedCommunicator.start = Communicator.start
    try:
        yield
    finally:
        QueuedCommunicator.start = before


@dataclass(frozen=True, slots=True)
class Result:
    """Whether the bits of a program are those of the CPU and of finished conversions, and its races and waits."""

    same_bits: bool
    races: int
    waits: list[LeftOut]

    @property
    def summary(self) -> str:
        """Return the result in a line, for progress."""
        bits = "the same bits" if self.same_bits else "OTHER BITS"
        return f"{bits}, {self.races} races, {len(self.unneeded)} of {len(self.waits)} waits not needed"

    @property
    def unneeded(self) -> list[str]:
        """Return the names of waits whose absence is not found."""
        return [wait.where for wait in self.waits if not wait.found and not wait.covered]


def result_of(devices: Devices, case: Case) -> Result:
    """Run a program in each way."""
    with buckets_of(case.bucket), sdpa_kernel(SDPBackend.MATH):
        return _result_of(devices, case)


def _result_of(devices: Devices, case: Case) -> Result:
    expected, queued = case.run(on_devices=False), case.run(on_devices=True)
    with finished_conversions():
        finished = case.run(on_devices=True)
    same = _are_equal(queued, expected) and _are_equal(finished, expected)
    races = len(devices.take_races())
    return Result(same, races, left_out_waits(devices, case.training))


def _are_equal(found: Iterable[list[Tensor]], expected: Iterable[list[Tensor]]) -> bool:
    return all(all(map(torch.equal, ours, theirs)) for ours, theirs in zip(found, expected, strict=True))


def run(quick: bool = False) -> dict[str, Any]:
    devices, cases = Devices(), QUICK if quick else CASES
    if any(case.is_compiled for case in cases):
        register_kernels()
    found: dict[str, Result] = {}
    for case in cases:
        found[str(case)] = result_of(devices, case)
        print(f"# {case}: {found[str(case)].summary}", file=sys.stderr, flush=True)
    different = [name for name, each in found.items() if not each.same_bits]
    races = sum(each.races for each in found.values())
    unneeded = {name: each.unneeded for name, each in found.items() if each.unneeded}
    waits = [wait for each in found.values() for wait in each.waits]
    left_out = sum(wait.found for wait in waits)
    right = not different and not races and not unneeded
    return {
        "value": {"other bits": len(different), "races": races, "unneeded waits": sum(map(len, unneeded.values()))},
        "goal": f"0, 0 and 0, with at least {PROGRAMS_GOAL} programs and {WAITS_GOAL} waits found missing",
        "ok": right and len(found) >= PROGRAMS_GOAL and left_out >= WAITS_GOAL,
        "details": {
            "programs": len(found),
            "waits left out": len(waits),
            "found missing": left_out,
            "covered by others": sum(wait.covered for wait in waits),
            "other bits": different,
            "unneeded": unneeded,
            "by program": {name: _counts(each.waits) for name, each in found.items()},
        },
    }


def _counts(waits: Iterable[LeftOut]) -> dict[str, str]:
    """Return for each name of waits how many of them are found missing, of how many."""
    by_name: dict[str, list[bool]] = {}
    for wait in waits:
        by_name.setdefault(wait.where, []).append(wait.found)
    return {name: f"{sum(each)} of {len(each)}" for name, each in by_name.items()}
