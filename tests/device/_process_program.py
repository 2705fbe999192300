"""Train on the CPU and on a device, in processes; write whether the bits are equal, and the calls of both."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.comm import current_communicator
from tests.device.backend import register
from tests.device.process_backend import register_backend
from tests.device.training import train
from tests.pipeline.oracle import piped

CASES = [(kind, static) for kind in ("dp", "ZeRO-3") for static in (False, True)]
PIPELINES = {"1F1B": (0, 1), "ZB-V": (0, 1, 1, 0)}
"""Schedule → the stage of each chunk."""


def pipelined(schedule: str, stages: Sequence[int], device: str) -> tuple[list[Any], str]:
    """Return the losses and parameters of a pipeline, and the calls of this rank."""
    seen = current_communicator().seen
    seen.reset()
    losses, state, _ = piped(stages, {"accumulate_steps": 4, "schedule_mode": schedule}, 8, device=device)
    return [losses, {name: x.tolist() for name, x in state.items()}], str(seen)


def main(folder: Path, backend: str | None = None) -> None:
    register()
    register_backend()
    here = mw.init_process(backend)
    found: dict[str, list[Any]] = {}
    devices = ("cpu", f"mesh:{here.rank}")
    for kind, static in CASES:
        (on_cpu, cpu_calls), (on_device, calls) = (train(kind, static, device) for device in devices)
        found[f"{kind} {static}"] = [all(map(torch.equal, on_cpu, on_device)), cpu_calls, calls]
    for schedule, stages in PIPELINES.items():
        (on_cpu, cpu_calls), (on_device, calls) = (pipelined(schedule, stages, device) for device in devices)
        found[schedule] = [on_cpu == on_device, cpu_calls, calls]
    (folder / f"{here.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
