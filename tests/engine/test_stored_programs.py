"""A later start loads the programs that an earlier one recorded, but none after any change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import meshwright as mw
from meshwright.engine.static import program_builder

pytestmark = pytest.mark.usefixtures("forked_processes")

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

RANKS = int(os.environ["RANKS"])

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


START = """
import json, os, runpy, sys
from pathlib import Path

for helper, rate, ranks in json.loads(sys.argv[1]):
    Path("helper.py").write_text(helper)
    sys.modules.pop("helper", None)
    os.environ |= {"LR": rate, "RANKS": ranks}
    runpy.run_path("script.py", run_name="__main__")
"""
Run = tuple[str, str, str]
"""The text of the helper, the learning rate, and the number of ranks."""


def start(folder: Path, *runs: Run) -> list[tuple[str, str]]:
    """Run the script in a process of its own, once per run: how many programs each rank recorded, and the losses."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "start.py").write_text(START)
    env = {**os.environ, "MESHWRIGHT_PROGRAMS": str(folder / "kept"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "start.py", json.dumps(runs)],
        check=False,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found = (line.partition("] ") for line in done.stdout.strip().splitlines())
    return [(recordings + "]", losses) for recordings, _, losses in found]


def test_a_second_start_records_nothing_without_a_change(tmp_path: Path) -> None:
    usual: Run = (HELPER, "0.1", "2")
    other_scale, other_code = HELPER.replace("2.0", "3.0"), HELPER.replace("x * SCALE", "x + SCALE")
    (first,) = start(tmp_path, usual)
    assert first[0] == "[1, 1]"
    changes = [(HELPER, "0.2", "2"), (other_scale, "0.1", "2"), (other_code, "0.1", "2"), (HELPER, "0.1", "3")]
    again, rate, scale, code, ranks, last = start(tmp_path, usual, *changes, usual)
    assert again == last == ("[0, 0]", first[1])
    assert rate[0] == "[0, 0]"  # a learning rate is an input of the program
    assert (scale[0], code[0]) == ("[1, 1]", "[1, 1]")
    assert len({first[1], rate[1], scale[1], code[1]}) == 4
    assert ranks[0] == "[1, 1, 1]"


def test_a_stored_program_needs_no_rules_for_the_captured_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MESHWRIGHT_PROGRAMS", str(tmp_path))

    def recordings() -> int:
        step = mw.to_static(torch.nn.Linear(4, 4), strategy=mw.Strategy.of(fused_passes={"enable": True}))
        step(torch.ones(2, 4))
        return step.recordings

    assert mw.simulate(recordings, 1) == [1]
    passes = "meshwright.engine.static.program_builder.apply_passes"
    with patch(passes, side_effect=program_builder.apply_passes) as applied:
        assert mw.simulate(recordings, 1) == [0]
    assert not any(given.args[1] for given in applied.call_args_list)
