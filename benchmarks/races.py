"""Training steps on the test device: programs with other bits than on the CPU, races, and waits that nothing needs.

Each program runs on the CPU, on four test devices, and once more there with every conversion finished at its start.
Then each wait of a step is left out in a step of its own. If its absence is not a race, another wait must cover it: a
step without the other waits for results has more races if this one is missing too.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from meshwright.comm import Communicator
from meshwright.comm.communicators.queued_communicator import QueuedCommunicator
from meshwright.passes import OverlapSchedule
from tests.device.communicator import run_on_devices
from tests.device.inspection import Devices
from tests.device.training import KINDS, Training, train

from ._left_out_waits import RANKS, LeftOut, left_out_waits

PROGRAMS_GOAL, WAITS_GOAL = 40, 30


Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One training program: a kind of parallelism, eager or static, and the options of a static step."""

    kind: str
    static: bool = False
    options: Options = ()

    @property
    def strategy(self) -> mw.Strategy | None:
        return mw.Strategy.of(**dict(self.options)) if self.options else None

    def train(self, device: torch.device | str) -> list[Tensor]:
        return train(self.kind, self.static, device, strategy=self.strategy)[0]

    def training(self, device: torch.device) -> Training:
        return Training(self.kind, self.static, device, strategy=self.strategy)

    def __str__(self) -> str:
        names = ", ".join(["overlapped" if name == "passes" else name for name, _ in self.options])
        return f"{self.kind}, {'static' if self.static else 'eager'}" + (f", {names}" if names else "")


OVERLAPPED = (("passes", (OverlapSchedule(),)), ("dp_optimization", {"fuse_grad_size_in_MB": 0}))
RELEASED = (*OVERLAPPED, ("release", True))
COMPILED = (*OVERLAPPED, ("compiler", "inductor"))
CASES = (
    *(Case(kind) for kind in KINDS),
    *(Case(kind, True) for kind in KINDS),
    *(Case(kind, True, OVERLAPPED) for kind in KINDS),
    *(Case(kind, True, RELEASED) for kind in ("dp", "ZeRO-3")),
)


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
    def unneeded(self) -> list[str]:
        """Return the names of waits whose absence is not found."""
        return [wait.where for wait in self.waits if not wait.found and not wait.covered]


def result_of(devices: Devices, case: Case) -> Result:
    """Run a program in each way."""
    expected = mw.simulate(lambda: case.train("cpu"), RANKS)
    queued = mw.simulate(run_on_devices(case.train), RANKS)
    with finished_conversions():
        finished = mw.simulate(run_on_devices(case.train), RANKS)
    same = _are_equal(queued, expected) and _are_equal(finished, expected)
    races = len(devices.take_races())
    return Result(same, races, left_out_waits(devices, case.training))


def _are_equal(found: Iterable[list[Tensor]], expected: Iterable[list[Tensor]]) -> bool:
    return all(all(map(torch.equal, ours, theirs)) for ours, theirs in zip(found, expected, strict=True))


def run(quick: bool = False) -> dict[str, Any]:
    devices = Devices()
    found = {str(case): result_of(devices, case) for case in (CASES[::4] if quick else CASES)}
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
