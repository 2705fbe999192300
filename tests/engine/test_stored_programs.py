"""A later start loads the programs that an earlier one recorded, but none after any change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HELPER = """
SCALE = 2.0

def scaled(x):
    return x * SCALE
"""
SCRIPT = """
import os
import torch, torch.nn.functional as F
from torch import nn
import meshwright as mw
from helper import scaled

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return scaled(self.down(F.gelu(self.up(x))))

def train():
    mesh = mw.ProcessMesh(list(range(RANKS)), ["tp"])
    torch.manual_seed(0)
    net = Net()
    net.up.weight = mw.shard_tensor(net.up.weight, mesh, [mw.Shard(0)])
    step = mw.to_static(net, None, F.mse_loss, torch.optim.AdamW(net.parameters(), lr=float(os.environ["LR"])))
    x = torch.ones(4, 4)
    losses = [step(x, x).item() for _ in range(3)]
    return step.recordings, losses

found = mw.simulate(train, RANKS)
print([n for n, _ in found], found[0][1])
"""


def start(folder: Path, script: str = SCRIPT, helper: str = HELPER, lr: str = "0.1", ranks: int = 2) -> tuple[Any, Any]:
    """Run the script in a process of its own; return how many programs each rank recorded, and the losses."""
    (folder / "helper.py").write_text(helper)
    (folder / "script.py").write_text(script.replace("RANKS", str(ranks)))
    env = {**os.environ, "MESHWRIGHT_PROGRAMS": str(folder / "kept"), "PYTHONDONTWRITEBYTECODE": "1", "LR": lr}
    run = subprocess.run(
        [sys.executable, "script.py"], check=False, cwd=folder, env=env, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr
    recordings, _, losses = run.stdout.strip().partition("] ")
    return recordings + "]", losses


def test_a_second_start_records_nothing_without_a_change(tmp_path: Path) -> None:
    first = start(tmp_path)
    assert first[0] == "[1, 1]"
    assert start(tmp_path) == ("[0, 0]", first[1])
    assert start(tmp_path, lr="0.2")[0] == "[0, 0]"  # a learning rate is an input of the program
    changed = start(tmp_path, helper=HELPER.replace("2.0", "3.0"))
    assert changed[0] == "[1, 1]"
    assert changed[1] != first[1]
    assert start(tmp_path, helper=HELPER.replace("x * SCALE", "x + SCALE"))[0] == "[1, 1]"
    assert start(tmp_path, ranks=3)[0] == "[1, 1, 1]"
    assert start(tmp_path) == ("[0, 0]", first[1])
