"""Train on the CPU and on a device, in processes; write whether the bits are equal, and the calls of both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import meshwright as mw
from tests.device.backend import register
from tests.device.process_backend import register_backend
from tests.device.training import train

CASES = [(kind, static) for kind in ("dp", "ZeRO-3") for static in (False, True)]


def main(folder: Path) -> None:
    register()
    register_backend()
    here = mw.init_process()
    found = {}
    for kind, static in CASES:
        (on_cpu, cpu_calls), (on_device, calls) = (train(kind, static, device) for device in ("cpu", "mesh:0"))
        found[f"{kind} {static}"] = [all(map(torch.equal, on_cpu, on_device)), cpu_calls, calls]
    (folder / f"{here.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
