"""One process of the tests: `_program.py FOLDER`. It saves and loads, and at the end one process is killed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.checkpoint import CheckpointError
from meshwright.checkpoint.formats import format_interface

MESH, OTHER = mw.ProcessMesh([0, 1, 2], ["x"]), mw.ProcessMesh([2, 0], ["y"])
WHOLE = torch.arange(70.0).reshape(7, 10)


def state(mesh: mw.ProcessMesh, dim: int, x: torch.Tensor) -> dict[str, Any]:
    return {"w": mw.shard_tensor(x.clone(), mesh, [mw.Shard(dim)]), "b": torch.ones(5) * x.sum(), "step": int(x.sum())}


def save_and_load(folder: Path) -> None:
    first = mw.save_state_dict(state(MESH, 0, WHOLE), folder / "step_00000001", async_save=True)
    second = mw.save_state_dict(state(MESH, 1, WHOLE * 2), folder / "step_00000002", async_save=True)
    assert first.done
    assert first.path.is_dir()
    second.wait()
    found = state(OTHER, 1, torch.zeros(7, 10))
    mw.load_state_dict(found, folder)
    assert torch.equal(mw.unshard_dtensor(found["w"]), WHOLE * 2)
    assert found["b"].tolist() == [2 * WHOLE.sum()] * 5
    assert found["step"] == 2 * WHOLE.sum()
    try:
        mw.load_state_dict({"w": found["w"]} | ({"z": torch.ones(1)} if mw.get_rank() == 1 else {}), folder)
    except CheckpointError as error:
        (folder / f"told_{mw.get_rank()}").write_text(str(error))
    mw.save_state_dict({"w": found["w"]}, folder / "hub", format="safetensors")
    mw.save_state_dict({"w": found["w"]}, folder / "dcp", format="dcp")


def one_is_killed(folder: Path) -> None:
    mw.save_state_dict(state(MESH, 0, WHOLE), folder / "step_00000001")
    if mw.get_rank() == 1:
        format_interface.write_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    saving = mw.save_state_dict(state(MESH, 0, WHOLE * 2), folder / "step_00000002", async_save=True)
    saving.wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    mw.init_process()
    save_and_load(Path(sys.argv[1]) / "all")
    (Path(sys.argv[1]) / f"all_{mw.get_rank()}").touch()  # the exit status says only that a process was killed
    one_is_killed(Path(sys.argv[1]) / "killed")
