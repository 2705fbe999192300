"""Loads from a file system that does not answer end within the time limit, whichever operation hangs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.checkpoint import CheckpointError, CheckpointFileError, ReadTimeoutError, open_checkpoint, verify

from .damage import FORMS, copied, right, saved, whole

OPERATIONS = ("open", "fstat", "stat", "pread", "preadv", "scandir")
"""The functions of `os` through which files are read."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {form: saved(tmp_path_factory.mktemp("saved"), form) for form in FORMS}


class Dead:
    """Operations of `os` on a folder, of which the n-th never returns."""

    def __init__(self, folder: Path, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.n, self.forever = 0, n, threading.Event()
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._hanging(getattr(os, name), str(folder)))

    def _hanging(self, real: Callable[..., Any], folder: str) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            if threading.current_thread().name == "checkpoint reader":
                self.count += 1
                if self.count == self.n:
                    self.forever.wait(60)
            return real(*args, **how)

        return call


def operations(folder: Path) -> int:
    """Return the number of operations of a load."""
    with pytest.MonkeyPatch.context() as patch:
        dead = Dead(folder, 0, patch)
        assert right(folder)
    return dead.count


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MESHWRIGHT_READ_TIMEOUT", "0.2")
    return


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("form", FORMS)
def test_a_load_ends_without_effect_if_any_operation_hangs(checkpoints: dict[str, Path], form: str) -> None:
    folder = checkpoints[form]
    count = operations(folder)
    assert count > 10
    for n in range(1, count + 1, max(count // 12, 1)):
        state = {name: torch.zeros_like(x) for name, x in whole().items()}
        with pytest.MonkeyPatch.context() as patch:
            dead = Dead(folder, n, patch)
            with pytest.raises(ReadTimeoutError, match=r"no answer from the file system for 0\.2 s") as caught:
                mw.load_state_dict(state, folder)
            dead.forever.set()
        assert str(folder) in caught.value.asked
        assert not any(x.any() for x in state.values())
    assert right(folder)


@pytest.mark.usefixtures("soon")
def test_all_ranks_raise_when_one_read_hangs(checkpoints: dict[str, Path]) -> None:
    folder = checkpoints["meshwright"]

    def load() -> str:
        with pytest.raises(CheckpointError) as caught:
            mw.load_state_dict({name: torch.zeros_like(x) for name, x in whole().items()}, folder)
        return type(caught.value).__name__

    with pytest.MonkeyPatch.context() as patch:
        dead = Dead(folder, 5, patch)
        assert mw.simulate(load, 3) == ["ReadTimeoutError"] * 3
        dead.forever.set()


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("read", [open_checkpoint, verify, mw.latest_checkpoint])
def test_every_reader_has_the_time_limit(checkpoints: dict[str, Path], read: Callable[[Path], Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        dead = Dead(checkpoints["meshwright"], 1, patch)
        with pytest.raises(ReadTimeoutError):
            read(checkpoints["meshwright"])
        dead.forever.set()


@pytest.mark.parametrize("form", FORMS)
def test_a_fifo_in_place_of_any_file_is_refused_by_name(
    checkpoints: dict[str, Path], tmp_path: Path, form: str
) -> None:
    folder = copied(checkpoints[form], tmp_path / "copy", checksums=True)
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(CheckpointFileError, match=file.name):
            mw.load_state_dict({name: torch.zeros_like(x) for name, x in whole().items()}, folder)
        file.unlink()
        file.write_bytes(data)


def test_a_fifo_as_the_path_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointFileError, match="a FIFO"):
        open_checkpoint(tmp_path / "x.safetensors")


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_an_invalid_limit_is_refused(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MESHWRIGHT_READ_TIMEOUT", text)
    with pytest.raises(CheckpointError, match="MESHWRIGHT_READ_TIMEOUT"):
        open_checkpoint(checkpoints["meshwright"])
