"""Real processes save and load together, and a killed process loses no checkpoint. Two launches of three processes."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

import meshwright as mw
from meshwright.checkpoint import verify
from meshwright.comm import launch

SCRIPT = str(Path(__file__).parent / "_program.py")
WHOLE = torch.arange(70.0).reshape(7, 10)


def test_processes_save_and_load_together(tmp_path: Path) -> None:
    assert launch([SCRIPT, str(tmp_path), "all"], 3, timeout=90) == 0
    texts = {(tmp_path / f"told_{rank}").read_text() for rank in range(3)}
    assert len(texts) == 1
    assert "no such tensor" in texts.pop()
    assert {verify(tmp_path / name).kind for name in ("step_00000001", "hub", "dcp")} == {
        "meshwright",
        "safetensors",
        "dcp",
    }
    assert torch.equal(load_file(tmp_path / "hub" / "model.safetensors")["w"], WHOLE * 2)
    assert not list(tmp_path.glob(".*"))


def test_a_killed_process_loses_no_checkpoint(tmp_path: Path) -> None:
    assert launch([SCRIPT, str(tmp_path), "killed"], 3, timeout=90) not in (0, 124)
    assert mw.latest_checkpoint(tmp_path) == tmp_path / "step_00000001"
    state = {"w": torch.zeros(7, 10), "step": 0}
    mw.load_state_dict(state, tmp_path)
    assert torch.equal(state["w"], WHOLE)
