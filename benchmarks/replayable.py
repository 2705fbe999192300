"""Reads and waits of the host, and allocations, in a static step on the test device after the third step.

The third step with `Strategy(cuda_graph=True)` records a graph of the device, which later steps replay. The numbers are
those of a step of one rank. They are means of the fourth to the sixth step of four ranks, so they are whole if all
steps and ranks do the same. The loss that a step returns is a copy, whose allocation does not count.
"""

from __future__ import annotations

from typing import Any

import torch

import meshwright as mw
from meshwright.comm import current_communicator
from tests.device.communicator import run_on_devices
from tests.device.inspection import Counts, Devices
from tests.device.training import Training

from ._race_programs import Case

RANKS, BEFORE, COUNTED = 4, 3, 3
CASES = tuple(Case(kind, True, (("cuda_graph", True),)) for kind in ("dp", "tp", "ZeRO-3", "pp"))
MEASURED = ("host_reads", "host_waits", "allocations")
RESULTS = 1
"""Allocations for the results of a step."""


def counts_of(devices: Devices, case: Case) -> Counts:
    """Return the events of the counted steps of all ranks."""
    found = [devices.counts()] * 2

    def program(device: torch.device) -> None:
        training = Training(case.kind, case.static, device, strategy=case.strategy, capturable=True)
        for at, steps in enumerate((BEFORE, COUNTED)):
            for _ in range(steps):
                training.step()
            _meet()
            if device.index == 0:
                found[at] = devices.counts()
            _meet()

    mw.simulate(run_on_devices(program), RANKS)
    return found[1] - found[0]


def _meet() -> None:
    current_communicator().barrier(tuple(range(RANKS)))


def run(quick: bool = False) -> dict[str, Any]:
    devices = Devices()
    found = {case.kind: counts_of(devices, case) for case in (CASES[:1] if quick else CASES)}
    of_step = {
        name: {event: getattr(counts, event) / (COUNTED * RANKS) for event in (*MEASURED, "launches")}
        for name, counts in found.items()
    }
    for each in of_step.values():
        each["allocations"] -= RESULTS
    value = {event: max(each[event] for each in of_step.values()) for event in MEASURED}
    return {
        "value": value,
        "goal": "0 each",
        "ok": not any(value.values()),
        "details": of_step,
    }
