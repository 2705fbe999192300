"""Saves that fail, two jobs on one folder, programs that end, and states that do not fit."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.checkpoint import CheckpointError, CheckpointWarning, FolderInUseError
from meshwright.checkpoint.formats import safetensors_file
from meshwright.checkpoint.operations import folder_lock
from meshwright.engine.training.background_saves import BackgroundSaves

pytestmark = pytest.mark.usefixtures("forked_processes")

HOLD = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print(1, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def locked_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Yield a folder that another process has locked, and that process."""
    monkeypatch.setattr(folder_lock, "PATIENCE", 0.1)
    how: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], **how) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield tmp_path, process
        process.kill()


def test_a_second_job_is_refused_on_all_ranks_until_the_first_is_dead(locked_folder: Any) -> None:
    folder, first = locked_folder

    def save(step: int) -> str:
        try:
            return str(mw.save_checkpoint(folder, step, nn.Linear(2, 2)).path.name)
        except FolderInUseError as error:
            return f"{error.found}"

    told = mw.simulate(save, 2, 1)
    assert all("another job that saves there" in text for text in told)
    assert not list(folder.iterdir())
    first.kill()
    first.wait()
    assert mw.simulate(save, 2, 2) == ["step_00000002"] * 2


def test_reading_and_other_names_need_no_lock(locked_folder: Any) -> None:
    folder, _ = locked_folder
    mw.save_state_dict({"x": torch.ones(2)}, folder / "one")
    state = {"x": torch.zeros(2)}
    mw.load_state_dict(state, folder / "one")
    assert state["x"].tolist() == [1, 1]


def test_a_lock_ends_with_its_job(tmp_path: Path) -> None:
    mw.simulate(lambda: mw.save_checkpoint(tmp_path, 1, nn.Linear(2, 2)), 2)
    import gc

    gc.collect()
    assert not folder_lock.is_locked(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(CheckpointWarning, match="has no locks"):
        mw.simulate(lambda: mw.save_checkpoint(tmp_path, 1, nn.Linear(2, 2)), 1)


def test_a_lock_file_replaces_the_lock_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock

    def flock(descriptor: int, how: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EBADF, "")
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    mw.simulate(lambda: mw.save_checkpoint(tmp_path, 1, nn.Linear(2, 2)), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder_lock.LOCK_FILE, "step_00000001"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("background", [False, True])
def test_a_failed_save_is_reported_once_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, background: bool
) -> None:
    real, broken = safetensors_file.os.fsync, [True]

    def fsync(descriptor: int) -> None:
        if broken[0]:
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    state = {"x": torch.ones(3)}

    def save() -> None:
        with pytest.raises(CheckpointError, match=os.strerror(number)):
            mw.save_state_dict(state, tmp_path / "step_00000001", async_save=background).wait()

    mw.simulate(save, 2)
    assert not list(tmp_path.iterdir())
    broken[0] = False
    mw.simulate(lambda: mw.save_state_dict(state, tmp_path / "step_00000002"), 2)
    assert mw.latest_checkpoint(tmp_path) == tmp_path / "step_00000002"


def test_a_failed_save_leaves_nothing_when_another_rank_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmdir = os.rmdir

    def write_late(*args: Any, **more: Any) -> None:
        """Remove a folder, after another rank has written a file into the folder of the checkpoint."""
        for folder in folders:
            if folder.is_dir():
                (folder / "late").touch()
        rmdir(*args, **more)

    def full(_: int) -> None:
        folders.extend(tmp_path.glob("*.writing"))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folders: list[Path] = []
    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(os, "rmdir", write_late)
    with pytest.raises(CheckpointError, match="No space"):
        mw.save_state_dict({"x": torch.ones(3)}, tmp_path / "step_00000001")
    assert folders
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("choice", ["stop", "continue"])
def test_a_run_stops_or_continues_after_a_failed_save_as_configured(choice: str) -> None:
    said: list[Any] = []
    saves = BackgroundSaves(choice)

    def fails() -> Any:
        raise CheckpointError("to save", "a full disk", "the disk is full", "free disk space")

    if choice == "stop":
        with pytest.raises(CheckpointError, match="a full disk"):
            saves.begin(3, fails, said.append)
    else:
        with pytest.warns(CheckpointWarning, match="a full disk"):
            saves.begin(3, fails, said.append)
    assert [event["event"] for event in said] == ["failed checkpoint"]


PROGRAM = """
import sys, torch, meshwright as mw
from meshwright.checkpoint.formats import format_interface
if sys.argv[2] == "fails":
    def write_file(*_): raise OSError(28, "No space left on device")
    format_interface.write_file = write_file
mw.save_state_dict({"x": torch.ones(300, 300)}, sys.argv[1], async_save=True)
"""


@pytest.mark.parametrize("how", ["well", "fails"])
def test_a_background_save_completes_or_reports_at_exit(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "one"), how]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (tmp_path / "one" / "manifest.json").exists() == (how == "well")
    assert ("No space left on device" in done.stderr) == (how == "fails")


def test_ranks_that_load_other_paths_are_refused(tmp_path: Path) -> None:
    def program() -> str:
        rank = mw.get_rank()
        for name in ("a", "b"):
            mw.save_state_dict({"x": torch.ones(2)}, tmp_path / name)
        with pytest.raises(CheckpointError) as found:
            mw.load_state_dict({"x": torch.zeros(2)}, tmp_path / "ab"[rank])
        return found.value.found

    told = mw.simulate(program, 2)
    assert told == [f"{tmp_path / 'a'} on rank 0; {tmp_path / 'b'} on rank 1"] * 2


def test_everything_that_does_not_fit_is_listed_at_once(tmp_path: Path) -> None:
    saved = {"w": torch.ones(3, 4), "b": torch.ones(2), "i": torch.ones(2), "old": torch.ones(7), "step": 1}
    mw.save_state_dict(saved, tmp_path / "one")
    state = {
        "ww": torch.zeros(3, 4),
        "b": torch.zeros(3),
        "i": torch.zeros(2, dtype=torch.int32),
        "old": torch.zeros(7),
    }
    with pytest.raises(CheckpointError) as caught:
        mw.load_state_dict(state | {"rate": 0.5}, tmp_path / "one")
    text = str(caught.value)
    for line in (
        "ww: no such tensor",
        "w has the same shape: renamed?",
        "b: torch.float32 of shape (2,)",
        "i: ",
        "rate: no",
    ):
        assert line in text, line
    assert not any(x.any() for x in state.values())
    report = mw.load_state_dict(state, tmp_path / "one", strict=False)
    assert (report.missing_keys, report.unexpected_keys) == (("ww",), ("w", "step"))
    assert set(report.mismatched) == {"b", "i"}
    assert state["old"].all()


def test_an_optimizer_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    mw.save_checkpoint(tmp_path, 1, net, torch.optim.AdamW(net.parameters()))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="states of AdamW, but the optimizer is SGD"):
        mw.load_checkpoint(tmp_path, net, sgd)
    with pytest.raises(CheckpointError, match=r"0\.weight: no such tensor"):
        mw.load_checkpoint(tmp_path, nn.Sequential(net))
    resumed = mw.load_checkpoint(tmp_path, net, sgd, strict=False)
    assert set(resumed.report.mismatched) == {"optimizer"}
    assert sgd.param_groups[0]["lr"] == 0.1
