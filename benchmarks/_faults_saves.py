"""Rows 4, 5, 6 and 28: writers that are killed, saves that fail, and two jobs on one folder."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw
from benchmarks._fault_runs import Ended, Ranks, Verdict, run_ranks
from meshwright.checkpoint.formats import format_interface, safetensors_file

OFFSETS = 10
LIMIT = 120.0
"""Seconds in which ranks start and end on a machine with other work."""
LIMIT_BYTES = 12_000
"""Bytes of a file that a rank may write while its disk is full: fewer than its weights, more than it prints."""
WHOLE = torch.arange(2000.0).reshape(40, 50)


def _state(x: torch.Tensor) -> dict[str, Any]:
    mesh = mw.ProcessMesh([0, 1], ["x"])
    return {"w": mw.shard_tensor(x.clone(), mesh, [mw.Shard(0)]), "b": torch.ones(5) * x.sum(), "step": int(x.sum())}


class _Deadly:
    """A file whose writing process is killed after so many bytes."""

    def __init__(self, file: Any, left: int) -> None:
        self._file, self._left = file, left

    def __enter__(self) -> _Deadly:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        part = memoryview(data)[: self._left]
        self._left -= len(part)
        written = self._file.write(part)
        if len(part) < len(data):
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return written


def dies_while_writing(folder: str, run: str, offset: str) -> None:
    """Save a step, and be killed at a byte of the next one."""
    mw.init_process()
    mw.save_state_dict(_state(WHOLE), Path(run) / "step_00000001")
    safetensors_file.open = lambda *args: _Deadly(open(*args), int(offset))  # pyright: ignore[reportAttributeAccessIssue]
    mw.save_state_dict(_state(2 * WHOLE), Path(run) / "step_00000002")


def dies_before_the_commit(folder: str, run: str) -> None:
    """Save a step, and be killed between the files of the next one and its manifest."""
    mw.init_process()
    mw.save_state_dict(_state(WHOLE), Path(run) / "step_00000001")
    format_interface.manifest_text = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # pyright: ignore[reportAttributeAccessIssue]
    mw.save_state_dict(_state(2 * WHOLE), Path(run) / "step_00000002")


def _first_step_is_left(run: Path) -> bool:
    state = {"w": torch.zeros_like(WHOLE), "b": torch.zeros(5), "step": 0}
    mw.load_state_dict(state, run)
    names = [path.name for path in run.iterdir() if not path.name.startswith(".")]
    return names == ["step_00000001"] and torch.equal(state["w"], WHOLE)


def killed_while_writing() -> Verdict:
    """Both ranks are killed at ten offsets of their files: the complete step loads, the partial one is not listed."""
    draw, right = random.Random(0), 0
    for _ in range(OFFSETS):
        with tempfile.TemporaryDirectory() as run:
            ended = run_ranks(
                "benchmarks._faults_saves:dies_while_writing",
                2,
                arguments=[run, str(draw.randrange(4000))],
                limit=LIMIT,
            )
            right += _first_step_is_left(Path(run)) and any(e.status == -signal.SIGKILL for e in ended)
    return Verdict(right == OFFSETS, f"{right} of {OFFSETS}")


def killed_before_the_commit() -> Verdict:
    """Rank 0 is killed between shards and commit: the step before stays the latest."""
    with tempfile.TemporaryDirectory() as run:
        run_ranks("benchmarks._faults_saves:dies_before_the_commit", 2, arguments=[run], limit=LIMIT)
        good = _first_step_is_left(Path(run))
    return Verdict(good, "the step before loads" if good else "the step before is not the latest")


def trains(folder: str, run: str, how: str, on_failed_save: str) -> None:
    """Train ten steps with a checkpoint each; saves fail at steps 3 to 5."""
    rank = mw.init_process().rank
    mesh = mw.ProcessMesh([0, 1], dim_names=["dp"])
    torch.manual_seed(0)
    model = mw.shard_layer(torch.nn.Linear(64, 64), mesh)
    samples = TensorDataset(torch.randn(80, 64), torch.randint(0, 64, (80,)))
    loader = DataLoader(samples, batch_sampler=mw.GlobalSampler(samples, batch=8, seed=3))
    steps = iter(range(1, 100))

    def loss(out: Any, labels: Any) -> Any:
        step = next(steps)
        if step in (3, 6):
            time.sleep(0.3)  # saves that began before are complete
            _break(how, rank, step == 3)
        return F.cross_entropy(out, labels)

    training = mw.Training(
        10, run, save_every=1, keep=None, show=False, log=Path(folder) / "log", on_failed_save=on_failed_save
    )
    data = mw.shard_dataloader(loader, mesh, "dp")
    end = mw.train(model, torch.optim.SGD(model.parameters(), lr=0.1), data, training, loss=loss)
    print("steps", len(end.losses), "failed", (Path(folder) / "log").read_text().count('"failed checkpoint"'))


def _break(how: str, rank: int, broken: bool) -> None:
    """Make saves fail, or succeed again."""
    if how == "full disk" and rank == 0:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES if broken else hard, hard))
    elif how == "permission" and rank == 0:
        os.seteuid(65534 if broken else 0)
    elif how == "input/output error" and rank == 1:
        safetensors_file.os = _Broken() if broken else os


class _Broken:
    """`os` with a disk that fails."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, _: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def saves_that_fail() -> Verdict:
    """ENOSPC, EIO or permission at some saves: an error on all ranks, the run stops or continues, later saves work."""
    words = {
        "full disk": "File too large",
        "permission": "Permission denied",
        "input/output error": "Input/output error",
    }
    wrong: list[str] = []
    worst = 0.0
    for how, word in words.items():
        for choice in ("stop", "continue"):
            with tempfile.TemporaryDirectory() as run:
                ended = run_ranks("benchmarks._faults_saves:trains", 2, arguments=[run, how, choice], limit=LIMIT)
                last = mw.latest_checkpoint(run)
                torn = [path.name for path in Path(run).iterdir() if path.name.endswith(".writing")]
            worst = max(worst, *(e.seconds for e in ended))
            if not _as_configured(ended, choice, word, last) or torn:
                wrong.append(f"{how}, {choice}: {[e.status for e in ended]}, {last}, {torn}, {ended[0].output[-600:]}")
    return Verdict(not wrong, "; ".join(wrong) or "6 of 6 as configured")


def _as_configured(ended: list[Ended], choice: str, word: str, last: Path | None) -> bool:
    name = last.name if last is not None else ""
    if choice == "stop":
        return all(e.status == 1 and word in e.output for e in ended) and name == "step_00000002"
    told = [e.output for e in ended]
    return (
        all(e.status == 0 and "steps 10 failed 3" in e.output for e in ended) and name == "step_00000010" and bool(told)
    )


def saves_on(folder: str, run: str, step: str) -> None:
    """Save a step, and wait to be killed."""
    mw.init_process()
    mw.save_checkpoint(run, int(step), torch.nn.Linear(2, 2))
    (Path(folder) / "saved").write_text(os.environ["MASTER_PORT"])
    time.sleep(LIMIT)


def two_jobs() -> Verdict:
    """A second job on the port or the folder of a job is refused on all ranks; another job may follow the first one."""
    on_folder, on_port = list[Ended](), list[Ended]()
    with tempfile.TemporaryDirectory() as run, tempfile.TemporaryDirectory() as other:

        def second(first: Ranks) -> None:
            port = first.wait_for("saved", LIMIT).read_text()
            own = {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False", "MESHWRIGHT_PATIENCE": f"{_PATIENCE}"}
            on_port.extend(run_ranks(_SAVES, 2, arguments=[other, "1"], each=lambda _: own, limit=LIMIT))
            on_folder.extend(run_ranks(_SAVES, 2, arguments=[run, "2"], limit=LIMIT))
            _kill_both(first)

        run_ranks(_SAVES, 2, second, [run, "1"], limit=2 * LIMIT)
        third = run_ranks(_SAVES, 2, _end_when_saved, [run, "3"], limit=LIMIT)
    told = {
        "port": all("fix:" in e.output and e.status == 1 for e in on_port),
        "folder": all("FolderInUseError" in e.output and e.status == 1 for e in on_folder),
        "third saved": all(e.status == -signal.SIGKILL for e in third),
    }
    seconds = [max(e.seconds for e in ended) for ended in (on_port, on_folder)]
    return Verdict(all(told.values()), f"{told}, {seconds} s with the start")


_SAVES = "benchmarks._faults_saves:saves_on"
_PATIENCE = 3
"""Seconds after which a rank gives up a peer that never starts: the second job's rank 0 cannot."""


def _end_when_saved(run: Ranks) -> None:
    run.wait_for("saved", LIMIT)
    _kill_both(run)


def _kill_both(run: Ranks) -> None:
    for rank in range(2):
        run.send(rank, signal.SIGKILL)


ROWS = {4: killed_while_writing, 5: killed_before_the_commit, 6: saves_that_fail, 28: two_jobs}
