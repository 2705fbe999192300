"""Training steps on the test device with one wait of a stream left out at a time, and whether a race is reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

import meshwright as mw
from meshwright.comm import current_communicator
from tests.device.communicator import run_on_devices
from tests.device.inspection import Devices
from tests.device.training import Training
from tests.device.waits import leaving_out, recording_waits

RANKS = 4
ALL = tuple(range(RANKS))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A wait of a step: its name, its index among the waits with this name, and whether its absence is a race."""

    where: str
    nth: int
    found: bool


def left_out_waits(devices: Devices, training: Callable[[torch.device], Training]) -> list[LeftOut]:
    """Return every wait of the third step of a program, each left out in a step of its own."""

    names: list[str] = []  # of rank 0, for all ranks

    def program(device: torch.device) -> list[LeftOut]:
        made = training(device)
        for _ in range(2):
            made.step()
        if current_communicator().rank == 0:
            with recording_waits() as recorded:
                _step_together(made)
            names.extend(recorded)
        else:
            _step_together(made)
        current_communicator().barrier(ALL)
        counts: Counter[str] = Counter()
        found: list[LeftOut] = []
        for where in names:
            found.append(LeftOut(where, counts[where], _has_race(devices, made, where, counts[where])))
            counts[where] += 1
        return found

    return mw.simulate(run_on_devices(program), RANKS)[0]


def _has_race(devices: Devices, made: Training, where: str, nth: int) -> bool:
    """True on rank 0 if a step without one wait has a race; the others return False."""
    here = current_communicator()
    if here.rank != 0:
        _step_together(made)
        return False
    devices.take_races()
    with leaving_out(where, nth):
        _step_together(made)
    return bool(devices.take_races())


def _step_together(made: Training) -> None:
    """Make a step that begins and ends on all ranks before any rank goes on."""
    here = current_communicator()
    here.barrier(ALL)
    made.step()
    torch.accelerator.synchronize()
    here.barrier(ALL)
