"""One rank of two: a pipeline that saves its programs, and a new one that loads them. Writes the losses of both."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import meshwright as mw


def run(folder: Path, what: str) -> dict[str, Any]:
    """Return the losses of a new model, which saves or loads its programs, and the number of its recordings."""
    mesh = mw.ProcessMesh([0, 1], ["pp"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    mw.split_pipeline(net, mesh, at=["2"])
    options = {"enable": True, "schedule_mode": "ZB-H1", "accumulate_steps": 4}
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.0)
    step = mw.to_static(net, None, nn.functional.mse_loss, optimizer, mw.Strategy.of(pipeline=options))
    if what == "load":
        step.load(folder)
    x = torch.arange(32.0).reshape(8, 4) / 32
    losses = [step(x, x[:, :1]).item() for _ in range(3)]
    if what == "save":
        step.save(folder)
    return {"losses": losses, "recordings": step.recordings}


if __name__ == "__main__":
    torch.set_num_threads(1)
    communicator = mw.init_process()
    place = Path(sys.argv[1])
    found: dict[str, Any] = {}
    for what in ("save", "load"):
        found[what] = run(place, what)
        communicator.barrier((0, 1))  # a rank also loads what the other one saved
    (place / f"{communicator.rank}.json").write_text(json.dumps(found))
