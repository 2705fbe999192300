"""One process of a run that does not end by itself, and reports when it is at step 3 and where it ended."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import meshwright as mw


class Loss(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).square().mean()


def report(event: Any) -> None:
    if event["event"] == "step" and event["step"] == 3:
        print("step 3", flush=True)
    if event["event"] == "end":
        print("ended", event["step"], flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = mw.ProcessMesh([0, 1], ["dp"])
    net = mw.shard_layer(Loss(4, 4), mesh)
    loader = DataLoader(torch.ones(16, 4), batch_sampler=mw.GlobalSampler(16, 4))
    data = mw.shard_dataloader(loader, mesh, "dp")
    training = mw.Training(10**9, sys.argv[1], show=False)
    sys.exit(mw.train(net, torch.optim.SGD(net.parameters(), lr=1e-3), data, training, tell=report).exit_code)
