"""Training steps on the test device with one wait of a stream left out at a time, and whether a race is reported."""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

import meshwright as mw
from meshwright.comm import current_communicator
from tests.device.communicator import run_on_devices
from tests.device.inspection import Devices
from tests.device.waits import leaving_out_at, recording_waits

RANKS = 4
ALL = tuple(range(RANKS))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A wait of a step, which is left out.

    `found` is True if its absence is a race. Another wait for the same stream may cover it. Then `covered` is True: a
    step without all other waits for results has more races if this wait is missing too.
    """

    where: str
    found: bool
    covered: bool


class Training(Protocol):
    """A training run of one rank."""

    def step(self) -> object:
        """Make a step."""
        ...


def left_out_waits(devices: Devices, training: Callable[[torch.device], Training]) -> list[LeftOut]:
    """Return every wait of the third step of a program, each left out in a step of its own."""
    steps = _Steps(devices)

    def program(device: torch.device) -> list[LeftOut]:
        made = training(device)
        for _ in range(2):
            made.step()
        steps.record(made)
        return [_left_out(steps, made, at) for at in range(len(steps.names))]

    return mw.simulate(run_on_devices(program), RANKS)[0]


def _left_out(steps: _Steps, made: Training, at: int) -> LeftOut:
    name = steps.names[at]
    if steps.races(made, {at}):
        return LeftOut(name, found=True, covered=False)
    others = {n for n, other in enumerate(steps.names) if other.startswith("results") and n != at}
    with_it, without_it = steps.races(made, others), steps.races(made, {at, *others})
    return LeftOut(name, found=False, covered=without_it > with_it)


@dataclass(slots=True)
class _Steps:
    """Steps of all ranks, which share this object. Rank 0 changes the waits, and reads the races."""

    devices: Devices
    names: list[str] = field(default_factory=list[str])
    """Names of the waits of a step, those of rank 0."""
    latest: int = 0
    """Number of races in the latest step."""

    def record(self, made: Training) -> None:
        """Make a step, and set the names of its waits."""
        with recording_waits() if self._is_first else nullcontext() as recorded:
            _step_together(made)
        self.names += recorded or []
        current_communicator().barrier(ALL)

    def races(self, made: Training, indices: Container[int]) -> int:
        """Return the number of races in a step without some of its waits; it is equal on all ranks."""
        self.devices.take_races()
        with leaving_out_at(indices) if self._is_first else nullcontext():
            _step_together(made)
        if self._is_first:
            self.latest = len(self.devices.take_races())
        current_communicator().barrier(ALL)
        return self.latest

    @property
    def _is_first(self) -> bool:
        return current_communicator().rank == 0


def _step_together(made: Training) -> None:
    """Make a step that begins and ends on all ranks before any rank goes on."""
    here = current_communicator()
    here.barrier(ALL)
    made.step()
    torch.accelerator.synchronize()
    here.barrier(ALL)
