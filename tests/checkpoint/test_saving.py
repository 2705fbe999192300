"""Saving in the background, folders of steps, and files left by a killed writer."""

from __future__ import annotations

import json
import shutil
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.checkpoint import (
    CheckpointError,
    CheckpointWarning,
    NewerFormatError,
    current_world,
    open_checkpoint,
    steps_in,
)
from meshwright.checkpoint.formats import format_interface
from meshwright.comm import Communicator
from meshwright.layout import ProcessMesh, parse_layout

from .oracle import laid, numbered

PAIR = ProcessMesh([0, 1], ["x"])


def delay_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Delay all writes of files until the returned event is set."""
    real, go = format_interface.write_file, threading.Event()

    def write(*args: Any) -> Any:
        assert go.wait(20)
        return real(*args)

    monkeypatch.setattr(format_interface, "write_file", write)
    return go


def test_tensors_may_change_while_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = delay_writes(monkeypatch)

    def save() -> bool:
        x, plain = laid(numbered((4, 3)), (PAIR, parse_layout("[@x, :]"))), torch.ones(3)
        saving = mw.save_state_dict({"x": x, "plain": plain}, tmp_path / "one", async_save=True)
        done = saving.done
        with torch.no_grad():
            x.zero_()
            plain.zero_()
        go.set()
        assert saving.wait() == tmp_path / "one"
        return done

    assert mw.simulate(save, 2) == [False, False]
    state = {"x": torch.zeros(4, 3), "plain": torch.zeros(3)}
    mw.load_state_dict(state, tmp_path / "one")
    assert torch.equal(state["x"], numbered((4, 3)))
    assert state["plain"].tolist() == [1, 1, 1]


def test_a_checkpoint_completes_without_a_wait(tmp_path: Path) -> None:
    saving = mw.save_state_dict({"x": torch.ones(3)}, tmp_path / "one", async_save=True)
    while not saving.done:
        pass
    assert open_checkpoint(tmp_path / "one").entries.keys() == {"x"}


def test_a_second_save_waits_for_the_first_and_reports_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = delay_writes(monkeypatch)
    mw.save_state_dict({"x": torch.ones(3)}, tmp_path / "one", async_save=True)
    (tmp_path / "one").mkdir()
    go.set()
    with pytest.warns(CheckpointWarning, match="never overwritten"):
        assert mw.save_state_dict({"x": torch.ones(3)}, tmp_path / "two").path.is_dir()
    assert mw.save_state_dict({"x": torch.ones(3)}, tmp_path / "three").path.is_dir()


def test_loading_waits_for_a_background_save(tmp_path: Path) -> None:
    state = {"x": torch.ones(3)}
    mw.save_state_dict(state, tmp_path / "one", async_save=True)
    state["x"].zero_()
    mw.load_state_dict(state, tmp_path / "one")
    assert state["x"].tolist() == [1, 1, 1]


def test_only_the_latest_steps_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        mw.save_state_dict({"x": torch.ones(3)}, tmp_path / f"step_{step:08}", keep=2)
    assert [step for step, _ in steps_in(tmp_path)] == [5, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000004", "step_00000005"]
    with pytest.raises(CheckpointError, match="keep=1"):
        mw.save_state_dict({"x": torch.ones(3)}, tmp_path / "step_00000006", keep=0)


def test_the_latest_complete_step_is_found(tmp_path: Path) -> None:
    assert mw.latest_checkpoint(tmp_path / "nowhere") is None
    for step in (1, 2, 3):
        mw.save_state_dict({"step": step}, tmp_path / f"step_{step:08}")
    (tmp_path / "step_00000003" / "manifest.json").write_text("{")
    (tmp_path / ".step_00000004.0123.writing").mkdir()
    (tmp_path / "step_00000009").mkdir()
    with pytest.warns(CheckpointWarning, match="00009, step_00000003; the latest complete one is step_00000002"):
        assert mw.latest_checkpoint(tmp_path) == tmp_path / "step_00000002"
    state = {"step": 0}
    with pytest.warns(CheckpointWarning, match="damaged"):
        mw.load_state_dict(state, tmp_path)
    assert state["step"] == 2


def test_a_damaged_step_is_kept_aside_and_saved_again(tmp_path: Path) -> None:
    """A run that resumes from an older step reaches the damaged one again."""
    step = tmp_path / "step_00000003"
    mw.save_state_dict({"step": 3}, step)
    with pytest.raises(CheckpointError, match="never overwritten"):
        mw.save_state_dict({"step": 3}, step)
    (step / "manifest.json").write_text("{")
    with pytest.warns(CheckpointWarning, match="is saved again"):
        mw.save_state_dict({"step": 3}, step)
    assert mw.latest_checkpoint(tmp_path) == step
    (aside,) = tmp_path.glob("damaged.step_00000003.*")
    assert (aside / "manifest.json").read_text() == "{"


def test_the_next_save_removes_files_of_a_killed_writer(tmp_path: Path) -> None:
    left = tmp_path / ".step_00000004.0123.writing"
    (left / "reports").mkdir(parents=True)
    mw.save_state_dict({"step": 4}, tmp_path / "step_00000004")
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_that_is_removed_during_a_save_is_the_reported_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    for removed in ("run", "run/.step_*.writing/reports"):
        go = delay_writes(monkeypatch)

        def program(pattern: str, go: threading.Event) -> None:
            saving = mw.save_state_dict({"x": torch.ones(3)}, tmp_path / "run" / "step_00000001", async_save=True)
            if current_world().gathered(0) and current_world().rank == 0:
                for path in tmp_path.glob(pattern):
                    shutil.rmtree(path)
                go.set()
            with pytest.raises(CheckpointError, match="removed or renamed while the checkpoint was written"):
                saving.wait()

        mw.simulate(program, ranks, removed, go)


def test_no_rank_waits_for_the_report_of_a_dead_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, go = format_interface.write_file, threading.Event()

    def write(path: Path, *args: Any) -> Any:
        assert path.name != "rank_00001.safetensors" or go.wait(20)
        return real(path, *args)

    monkeypatch.setattr(format_interface, "write_file", write)
    monkeypatch.setattr(Communicator, "has_ended", lambda self, rank: rank == 1)

    def program() -> str:
        x = mw.shard_tensor(torch.ones(4), PAIR, [mw.Shard(0)])
        saving = mw.save_state_dict({"x": x}, tmp_path / "one", async_save=True)
        if current_world().rank == 0:
            saving._thread.join(10)
            go.set()
        with pytest.raises(CheckpointError) as found:
            saving.wait()
        return found.value.found

    assert mw.simulate(program, 2) == ["no report from rank 1"] * 2
    assert not list(tmp_path.iterdir())


def test_a_step_in_a_newer_format_is_not_damaged(tmp_path: Path) -> None:
    steps = [tmp_path / f"step_{step:08}" for step in (1, 2, 3)]
    for step in steps[:2]:
        mw.save_state_dict({"x": torch.ones(3)}, step)
    manifest = steps[1] / "manifest.json"
    content = json.loads(manifest.read_text()) | {"format": 2, "versions": {"meshwright": "9.9"}}
    del content["sha256"]
    digest = sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    manifest.write_text(json.dumps({**content, "sha256": digest}))
    with pytest.raises(NewerFormatError, match=r"format 2, written by Meshwright 9\.9"):
        mw.load_state_dict({"x": torch.ones(3)}, tmp_path)
    with pytest.raises(CheckpointError, match="never overwritten"):
        mw.save_state_dict({"x": torch.ones(3)}, steps[1])
    mw.save_state_dict({"x": torch.ones(3)}, steps[2], keep=2)
    assert [path for _, path in steps_in(tmp_path)] == [steps[2], steps[1]]
