"""Train in processes whose collectives run beside their operators; write the virtual seconds of a step."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import meshwright as mw
from benchmarks._virtual_steps import Chain, Machine, VirtualStep, buckets_of, process_step
from benchmarks.overlap import CASES, EAGER_BUCKET
from tests.device import process_backend
from tests.device.inspection import Devices
from tests.device.waits import leaving_out

CHAIN, MACHINE = Chain(layers=4), Machine()
EAGER = "eager dp"
STEPS = (EAGER, "dp", "ZeRO-3")
Step = Callable[[mw.Strategy | None], VirtualStep]


def step_of(name: str, step: Step) -> VirtualStep:
    """Return the result of `step` for the strategy of a case; an eager step has none."""
    with buckets_of(EAGER_BUCKET):
        return step(None if name == EAGER else mw.Strategy.of(**CASES[name].options, passes=(MACHINE.schedule,)))


def main(folder: Path) -> None:
    devices = Devices()
    process_backend.LATENCY, process_backend.BANDWIDTH = MACHINE.latency, MACHINE.bandwidth
    process_backend.register_backend()
    device = torch.device("mesh", mw.init_process(check="off").rank)

    def step(strategy: mw.Strategy | None) -> VirtualStep:
        return process_step(devices, MACHINE, CHAIN, strategy, device)

    steps = {name: step_of(name, step) for name in STEPS}
    found = {name: [each.seconds, each.hidden, list(each.losses)] for name, each in steps.items()}
    races = len(devices.take_races())
    with leaving_out("results of a started all_reduce"):
        step_of("dp", step)
    missed = len(devices.take_races())
    (folder / f"{device.index}.json").write_text(json.dumps({"steps": found, "races": races, "missed": missed}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
