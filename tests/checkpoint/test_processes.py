"""Real processes save and load together, and a killed process loses no checkpoint. One launch of three processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import meshwright as mw
from meshwright.checkpoint import verify
from meshwright.comm import launch

pytestmark = pytest.mark.usefixtures("forked_processes")

SCRIPT = str(Path(__file__).parent / "_program.py")
WHOLE = torch.arange(70.0).reshape(7, 10)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that three processes wrote."""
    folder = tmp_path_factory.mktemp("three")
    for name in ("all", "killed"):
        (folder / name).mkdir()
    assert launch([SCRIPT, str(folder)], 3, timeout=90) not in (0, 124)
    return folder


def test_processes_save_and_load_together(three: Path) -> None:
    place = three / "all"
    assert all((three / f"all_{rank}").exists() for rank in range(3)), "an assertion of a process failed"
    texts = {(place / f"told_{rank}").read_text() for rank in range(3)}
    assert len(texts) == 1
    assert "no such tensor" in texts.pop()
    assert {verify(place / name).kind for name in ("step_00000001", "hub", "dcp")} == {
        "meshwright",
        "safetensors",
        "dcp",
    }
    assert torch.equal(load_file(place / "hub" / "model.safetensors")["w"], WHOLE * 2)
    assert not list(place.glob(".*"))


def test_a_killed_process_loses_no_checkpoint(three: Path) -> None:
    place = three / "killed"
    assert mw.latest_checkpoint(place) == place / "step_00000001"
    state = {"w": torch.zeros(7, 10), "step": 0}
    mw.load_state_dict(state, place)
    assert torch.equal(state["w"], WHOLE)
