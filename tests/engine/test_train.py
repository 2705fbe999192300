"""The training loop: a stopped run resumes exactly, reports its steps, and refuses invalid updates."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw
from meshwright.engine import NonFiniteGradientError, TrainingError, stop_signals
from meshwright.search import MeshPlan

pytestmark = pytest.mark.usefixtures("forked_processes")

STEPS = 6
SCRIPT = str(Path(__file__).parent / "_train_program.py")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, 4))


def samples() -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(20, 6, generator=g), torch.randint(0, 4, (20,), generator=g))


def marks(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
    if name == "0" and "tp" in mesh.dim_names:
        for key, p in list(layer.named_parameters(recurse=False)):
            setattr(layer, key, mw.shard_tensor(p, mesh, [mw.Replicate(), mw.Shard(0)]))


def run(mesh: Any, how: mw.Training, split: bool = False, **more: Any) -> Any:
    """Return the losses, whole parameters, and the end of the run."""
    net = network()
    data: Any = samples()
    if mesh is not None:
        axis: dict[str, Any] = {"mesh": mesh, "axis": "dp"} if split else {}
        sampler = mw.GlobalSampler(data, 8, seed=2, **axis)
        data = mw.shard_dataloader(DataLoader(data, batch_sampler=sampler), mesh, "dp")
        mw.shard_layer(net, mesh, marks)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    end = mw.train(net, optimizer, data, how, loss=F.cross_entropy, scheduler=scheduler, **more)
    return end.losses, [mw.unshard_dtensor(p.detach()) for p in net.parameters()], end


ONE, FOUR = ([0], ["dp"]), ([[0, 1], [2, 3]], ["dp", "tp"])


def on(where: Any, how: mw.Training, **more: Any) -> Any:
    ranks = mw.ProcessMesh(*where).size
    found = mw.simulate(lambda: run(mw.ProcessMesh(*where), how, **more), ranks)
    assert all(other[0] == found[0][0] for other in found)
    return found[0]


def quiet(steps: int, folder: Path | None = None, **how: Any) -> mw.Training:
    return mw.Training(steps, folder, show=False, **how)


@pytest.mark.parametrize("where", [ONE, FOUR], ids=["one device", "four ranks"])
@pytest.mark.parametrize("other", [ONE, FOUR, ([0, 1, 2], ["dp"])], ids=["one", "four", "three"])
def test_a_stopped_run_resumes_exactly(where: Any, other: Any, tmp_path: Path) -> None:
    losses, parameters, _ = on(where, quiet(STEPS, clip=1.0))
    first, _, _ = on(where, quiet(3, tmp_path, clip=1.0))
    later, found, end = on(other, quiet(STEPS, tmp_path, clip=1.0), split=True)
    assert (end.begun, end.exit_code, end.checkpoint) == (3, 0, tmp_path / "step_00000006")
    assert first == losses[:3]
    if where is other:
        assert later == losses[3:]
        assert all(torch.equal(a, b) for a, b in zip(parameters, found, strict=True))
    assert later == pytest.approx(losses[3:], rel=1e-6)
    assert on(other, quiet(STEPS, tmp_path))[0] == ()


def test_the_log_has_a_line_for_every_event(tmp_path: Path) -> None:
    how = quiet(4, tmp_path, save_every=2, evaluate_every=3, device="H100", flops=1e9, plan="by hand", keep=1)
    seen: list[Any] = []
    on(FOUR, how, evaluation=[samples()[:]], tell=seen.append)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == [
        "start",
        "step",
        "step",
        "checkpoint",
        "step",
        "evaluation",
        "step",
        "checkpoint",
        "end",
    ]
    assert lines == [dict(event) for event in seen]
    start, step = lines[0], lines[1]
    assert (start["ranks"], start["plan"], start["parameters"], start["steps"]) == (4, "by hand", 136, 4)
    assert start["meshes"] == ["ProcessMesh([dp=2, tp=2])"]
    assert set(step) == {
        "event",
        "step",
        "loss",
        "gradient_norm",
        "learning_rate",
        "seconds",
        "tokens_per_second_per_device",
        "mfu",
        "peak_memory",
        "loss_scale",
    }
    assert step["learning_rate"] == 0.01
    assert step["tokens_per_second_per_device"] == pytest.approx(8 / step["seconds"] / 4)
    assert step["mfu"] == pytest.approx(1e9 / (step["seconds"] * 4 * 67e12))
    assert step["peak_memory"] > 2**20
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000004"]


def test_the_banner_has_the_prediction_of_a_plan(capfd: pytest.CaptureFixture[str]) -> None:
    plan = MeshPlan(mw.ProcessMesh(*FOUR), {}, seconds=0.5, nbytes=2e9)
    seen: list[Any] = []
    on(FOUR, mw.Training(2, plan=plan), tell=seen.append)
    start = seen[0]
    assert (start["plan"], start["predicted_seconds"], start["predicted_bytes"]) == ("2 replicas of 2 ranks", 0.5, 2e9)
    shown = capfd.readouterr().err
    assert "ProcessMesh([dp=2, tp=2])" in shown
    assert "predicted seconds  0.5" in shown
    assert shown.count("end at step 2") == 1  # rank 0 alone


def test_curves_are_drawn_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            drawn.append(folder)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            drawn.append((name, step))

        def close(self) -> None:
            drawn.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    on(ONE, quiet(2, tensorboard="curves", evaluate_every=2), evaluation=[samples()[:]])
    assert (drawn[0], drawn[-1]) == ("curves", "closed")
    assert {("step/loss", 1), ("step/gradient_norm", 2), ("evaluation/loss", 2)} <= set(drawn)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TrainingError, match="pip install tensorboard"):
        on(ONE, quiet(2, tensorboard="curves"))


def test_numbers_are_those_of_plain_torch() -> None:
    net, data = network(), samples()
    net[2] = nn.Identity()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    x, y = data[:]
    expected = []
    for _ in range(3):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        expected.append((loss.item(), norm.item()))

    def go() -> list[tuple[float, float]]:
        net = network()
        net[2] = nn.Identity()
        mesh = mw.ProcessMesh(*FOUR)
        mw.shard_layer(net, mesh, marks)
        events: list[Any] = []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        batches = mw.shard_dataloader([(x, y)], mesh, "dp")
        mw.train(net, optimizer, batches, quiet(3, clip=0.1), loss=F.cross_entropy, tell=events.append)
        return [(e["loss"], e["gradient_norm"]) for e in events if e["event"] == "step"]

    found = mw.simulate(go, 4)
    assert found[1:] == [[]] * 3
    for ours, theirs in zip(found[0], expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_all_ranks_stop_before_a_non_finite_update() -> None:
    """The second batch has an infinite number in a row that one rank holds."""

    def go() -> Any:
        mesh = mw.ProcessMesh(*FOUR)
        net = mw.shard_layer(nn.Linear(2, 2), mesh)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        bad = torch.ones(4, 2)
        bad[3, 1] = torch.inf
        data = mw.shard_dataloader([(torch.ones(4, 2),), (bad,)], mesh, "dp")
        try:
            mw.train(nn.Sequential(net, Mean()), optimizer, data, quiet(5), tell=lambda _: kept.append(values(net)))
        except NonFiniteGradientError as error:
            return str(error), values(net), optimizer.state[net.weight]["step"].item()
        return None

    kept: list[Any] = []
    found = mw.simulate(go, 4)
    assert all(rank == found[0] for rank in found)
    text, parameters, step = found[0]
    assert (kept[-1], step) == (parameters, 1)
    assert "the update of step 2" in text
    assert "not finite: 0.weight" in text


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def values(layer: nn.Module) -> list[Any]:
    return [mw.unshard_dtensor(p.detach()).tolist() for p in layer.parameters()]


def test_a_pipeline_takes_a_batch_by_names(tmp_path: Path) -> None:
    def go(begin: int, steps: int) -> tuple[float, ...]:
        mesh = mw.ProcessMesh([0, 1], ["pp"])
        torch.manual_seed(0)
        net = mw.split_pipeline(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)), mesh)
        run = mw.microbatched(net, F.cross_entropy, mesh, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        data = mw.shard_dataloader(
            DataLoader(samples(), batch_sampler=mw.GlobalSampler(20, 10)), [mesh["pp", 0], mesh["pp", 1]]
        )
        end = mw.train(run, optimizer, data, quiet(steps, tmp_path / str(begin)))
        return end.losses

    whole = mw.simulate(lambda: go(0, 4), 2)
    assert mw.simulate(lambda: go(1, 2), 2)[0] + mw.simulate(lambda: go(1, 4), 2)[1] == whole[0] == whole[1]

    class Named(nn.Linear):
        def forward(self, *, x: torch.Tensor, y: torch.Tensor) -> Any:
            class Output:
                loss = F.mse_loss(super(Named, self).forward(x), y)

            return Output

    net = Named(3, 1)
    batch = {"x": torch.ones(2, 3), "y": torch.ones(2, 1)}
    end = mw.train(net, torch.optim.SGD(net.parameters(), lr=0.1), [batch], quiet(3))
    assert end.losses[2] < end.losses[0]


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    on(ONE, quiet(1, tmp_path))
    with pytest.raises(TrainingError, match="another folder"):
        on(ONE, quiet(1, tmp_path, resume=False))


def test_sigterm_in_a_simulated_run_saves_and_ends(tmp_path: Path) -> None:
    def at_two(event: Any) -> None:
        if event["event"] == "step" and event["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with stop_signals():
        losses, _, end = on(FOUR, quiet(500, tmp_path), tell=at_two)
    assert signal.getsignal(signal.SIGTERM) is before
    assert (end.stopped, end.exit_code) == (True, 143)
    assert mw.latest_checkpoint(tmp_path) == end.checkpoint == tmp_path / f"step_{len(losses):08}"


def test_sigterm_lets_processes_finish_a_step_and_save(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "meshwright", "run", "--ranks", "2", "--processes", SCRIPT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "step 3\n", process.stderr.read()
        process.send_signal(signal.SIGTERM)
        told, errors = process.communicate(timeout=60)
    last = int(told.split()[-1])
    assert process.returncode == 143, errors
    assert mw.latest_checkpoint(tmp_path) == tmp_path / f"step_{last:08}"
