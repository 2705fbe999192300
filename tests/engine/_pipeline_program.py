"""One rank of two: a pipeline that saves its programs, or loads them, and writes its losses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import meshwright as mw


def run(folder: Path, what: str) -> None:
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
    (folder / f"{what}-{mw.get_rank()}.json").write_text(json.dumps({"losses": losses, "recordings": step.recordings}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    mw.init_process()
    run(Path(sys.argv[1]), sys.argv[2])
