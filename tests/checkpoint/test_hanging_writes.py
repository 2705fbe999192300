"""A save to a file system that stops answering ends within the time limit, on all ranks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw
from meshwright.checkpoint import CheckpointError, CheckpointWarning, WriteTimeoutError
from meshwright.checkpoint.files import file_operations
from meshwright.checkpoint.formats import dcp_writer, format_interface, safetensors_file
from meshwright.checkpoint.operations import save as _save

FORMS = ("meshwright", "safetensors", "dcp")


class Dead:
    """File operations of saves, all of which hang from the n-th one on."""

    def __init__(self, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.n, self.forever = 0, n, threading.Event()
        self._lock = threading.Lock()
        for module in (_save, format_interface, safetensors_file, dcp_writer):
            monkeypatch.setattr(module, "write_operation", self._operation)

    def _operation(self, path: Path, call: Any, *args: Any) -> Any:
        with self._lock:
            self.count += getattr(call, "__name__", "") != "exists"  # rank 0 polls while it waits
            is_dead = 0 < self.n <= self.count
        if is_dead:
            file_operations.write_operation(path, self.forever.wait, 60)
            raise OSError(5, "the file system is gone")
        return file_operations.write_operation(path, call, *args)


def save(folder: Path, form: str) -> None:
    mesh = mw.ProcessMesh([0, 1], ["x"])
    state: dict[str, Any] = {"w": mw.shard_tensor(torch.arange(8.0), mesh, [mw.Shard(0)])}
    state |= {} if form == "safetensors" else {"n": 3}
    mw.save_state_dict(state, folder, format=form)


@pytest.mark.parametrize("form", FORMS)
def test_all_ranks_raise_if_any_operation_hangs_and_a_later_save_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setenv("MESHWRIGHT_WRITE_TIMEOUT", "0.2")
    with pytest.MonkeyPatch.context() as patch:
        dead = Dead(0, patch)
        mw.simulate(save, 2, tmp_path / "whole", form)
    assert dead.count > 6

    def told(name: str) -> str:
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path / name, form)
        assert str(tmp_path) in str(caught.value)
        return type(caught.value).__name__

    for n in range(1, dead.count + 1, max(1, dead.count // 6)):
        with pytest.MonkeyPatch.context() as patch:
            hanging = Dead(n, patch)
            names = mw.simulate(told, 2, f"torn{n}")
            hanging.forever.set()
        assert names == [WriteTimeoutError.__name__] * 2, f"operation {n}"
        assert not (tmp_path / f"torn{n}").exists()
    mw.simulate(save, 2, tmp_path / "later", form)


class PassingFault(Dead):
    """File operations that hang from the n-th one on, until the failure has been told on rank 0."""

    def told(self, event: Any) -> None:
        if event["event"] == "failed checkpoint":
            self.n = 0
            self.forever.set()


def train(folder: Path, tell: Any = None) -> tuple[tuple[float, ...], str]:
    """Return the losses of four steps with three checkpoints, and the name of the last one."""
    mesh = mw.ProcessMesh([0, 1], ["dp"])
    torch.manual_seed(0)
    model = mw.shard_layer(torch.nn.Linear(4, 4), mesh)
    samples = TensorDataset(torch.arange(64.0).reshape(16, 4), torch.ones(16, 4))
    data = mw.shard_dataloader(DataLoader(samples, batch_sampler=mw.GlobalSampler(samples, 4)), mesh, "dp")
    how = mw.Training(4, folder, save_every=1, keep=None, show=False, on_failed_save="continue")
    end = mw.train(model, torch.optim.SGD(model.parameters(), 1e-3), data, how, loss=mse_loss, tell=tell)
    assert end.checkpoint is not None
    return end.losses, end.checkpoint.name


def test_a_run_that_continues_goes_on_past_saves_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_WRITE_TIMEOUT", "0.2")
    with pytest.MonkeyPatch.context() as patch:
        whole = Dead(0, patch)
        expected = mw.simulate(train, 2, tmp_path / "whole")
    for n in range(1, whole.count // 2, max(1, whole.count // 4)):
        with pytest.MonkeyPatch.context() as patch:
            fault = PassingFault(n, patch)
            with pytest.warns(CheckpointWarning) as told:
                found = mw.simulate(train, 2, tmp_path / f"{n}", fault.told)
        assert found == expected, f"operation {n}"
        assert len(told) == 2, "one failure, told on two ranks"
        assert "WriteTimeoutError" in str(told[0].message)


def test_a_non_numeric_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_WRITE_TIMEOUT", "soon")
    with pytest.raises(CheckpointError, match="MESHWRIGHT_WRITE_TIMEOUT"):
        mw.save_state_dict({"w": torch.ones(2)}, tmp_path / "x")
