"""Training resumes from a checkpoint: to the bit on the same mesh, and like one device on any other."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.checkpoint import CheckpointError, open_checkpoint

AT, LAST = 3, 6
RANKS = {"one device": 0, "dp x tp": 4, "pipeline": 2, "zero": 8, "zero optimizer": 4}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(6, 10), nn.Dropout(0.2), nn.Linear(10, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.down(self.drop(F.gelu(self.up(x))))


class Data:
    """A data set whose state is its position."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def next(self) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(self.at)
        self.at += 1
        return torch.randn(12, 6, generator=g), torch.randn(12, 3, generator=g)


def parts(layer: nn.Module, mesh: mw.ProcessMesh, *dims: int) -> None:
    for at, (name, p) in enumerate(list(layer.named_parameters(recurse=False))):
        placed = [mw.Replicate()] * (mesh.ndim - 1) + [mw.Shard(dims[at]) if dims[at] >= 0 else mw.Replicate()]
        setattr(layer, name, mw.shard_tensor(p, mesh, placed))


def lay(net: Net, way: str) -> None:
    """Apply the marks of each kind of training."""
    if way in ("dp x tp", "zero optimizer"):
        mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
        parts(net.up, mesh, 0, 0)
        parts(net.down, mesh, 1, -1)
        mw.shard_layer(net, mesh, None, lambda x, m: tuple(mw.reshard(i, m, [mw.Shard(0)]) for i in x))
    if way == "pipeline":
        for layer, rank in ((net.up, 0), (net.drop, 0), (net.down, 1)):
            stage = mw.ProcessMesh([rank], ["x"])
            mw.shard_layer(layer, stage, None, lambda x, m: tuple(mw.reshard(i, m, []) for i in x))
    if way == "zero":
        mesh = mw.ProcessMesh(range(8), ["dp"])
        parts(net.up, mesh, 0, 0)
        parts(net.down, mesh, 0, 0)
        mw.shard_layer(net, mesh, None, lambda x, m: tuple(mw.reshard(i, m, [mw.Shard(0)]) for i in x))


class Run:
    """A training run: plain, eager on a mesh, or static."""

    def __init__(self, way: str, static: bool | mw.Strategy = False) -> None:
        torch.manual_seed(0)
        self.net, self.data = Net(), Data()
        lay(self.net, way)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        if way == "zero optimizer":
            mw.shard_optimizer(self.optimizer, lambda key, p, acc: [mw.Shard(0)] if acc.dim() == 2 else None)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        strategy = static if isinstance(static, mw.Strategy) else None
        self.static = mw.to_static(self.net, None, F.mse_loss, self.optimizer, strategy) if static else None

    def step(self) -> float:
        x, y = self.data.next()
        if self.static is not None:
            loss = self.static(x, y)
        else:
            loss = F.mse_loss(self.net(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.item()

    def trained(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]

    def saved(self, folder: Path, **how: Any) -> Any:
        model = self.static or self.net
        return mw.save_checkpoint(folder, AT, model, self.optimizer, self.scheduler, data=self.data, **how)

    def loaded(self, folder: Path) -> int:
        torch.manual_seed(1234)
        return mw.load_checkpoint(folder, self.static or self.net, self.optimizer, self.scheduler, data=self.data).step


def on(way: str, fn: Any, *args: Any) -> Any:
    return mw.simulate(fn, RANKS[way], *args)[-1] if RANKS[way] else fn(*args)


def first(way: str, static: bool | mw.Strategy, folder: Path) -> list[float]:
    run = Run(way, static)
    run.trained(AT)
    saving = run.saved(folder, async_save=True)
    losses = run.trained(LAST - AT)
    saving.wait()
    return losses


def then(way: str, static: bool | mw.Strategy, folder: Path) -> list[float]:
    run = Run(way, static)
    return run.trained(LAST - run.loaded(folder))


WAYS = [(way, static) for way in RANKS for static in (False, True) if RANKS[way] or not static]
NAMES = [f"{way}{', static' if static else ''}" for way, static in WAYS]


@pytest.mark.parametrize(("way", "static"), WAYS, ids=NAMES)
def test_training_resumes(tmp_path: Path, way: str, static: bool) -> None:
    expected = on(way, first, way, static, tmp_path)
    assert on(way, then, way, static, tmp_path) == expected
    eager = [(other, False) for other in RANKS]
    for other, also_static in WAYS if way == "one device" else eager:
        found = on(other, then, other, also_static, tmp_path)
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= 1e-6, other


ZERO = {f"stage {n}": mw.Strategy.of(sharding={"enable": True, "stage": n, "least": 1}) for n in (1, 2, 3)}


def test_every_stage_of_zero_resumes_from_every_other(tmp_path: Path) -> None:
    """States may also be loaded before the model is a program, which shards them otherwise."""
    for name, strategy in ZERO.items():
        expected = on("dp x tp", first, "dp x tp", strategy, tmp_path / name)
        for other in ZERO.values():
            assert on("dp x tp", then, "dp x tp", other, tmp_path / name) == expected
        assert (
            max(abs(a - b) for a, b in zip(then("one device", False, tmp_path / name), expected, strict=True)) <= 1e-6
        )


def test_a_pipeline_with_microbatches_resumes(tmp_path: Path) -> None:
    """The stages draw random numbers on their own, so each rank takes its own state of the generator."""
    strategy = mw.Strategy.of(pipeline={"enable": True, "accumulate_steps": 2})
    expected = on("pipeline", first, "pipeline", strategy, tmp_path)
    assert on("pipeline", then, "pipeline", strategy, tmp_path) == expected


def test_a_run_can_return_to_an_earlier_checkpoint(tmp_path: Path) -> None:
    """Existing states are filled in place, and keep their layouts."""

    def back() -> None:
        run = Run("zero optimizer")
        run.trained(AT)
        run.saved(tmp_path)
        state = run.optimizer.state[run.net.up.weight]["exp_avg"]
        spec = state.spec
        expected = run.trained(2)
        run.loaded(tmp_path)
        assert run.optimizer.state[run.net.up.weight]["exp_avg"] is state
        assert state.spec is spec
        assert run.trained(2) == expected

    mw.simulate(back, 4)


def test_random_generators_are_restored(tmp_path: Path) -> None:
    def draws() -> tuple[Any, ...]:
        return torch.rand(2).tolist(), random.random(), np.random.rand()

    def run() -> None:
        if mw.get_rank():
            torch.rand(mw.get_rank())  # each rank has its own generator
        with mw.random_source("rank"):
            mw.save_checkpoint(tmp_path, 1, nn.Linear(2, 2))
            expected = torch.rand(3)
            mw.load_checkpoint(tmp_path, nn.Linear(2, 2))
            assert torch.equal(torch.rand(3), expected)

    mw.simulate(run, 2)
    assert len(open_checkpoint(tmp_path).entries["random"].shape) == 2

    def elsewhere(source: Any) -> float:
        with mw.random_source(source):
            mw.load_checkpoint(tmp_path, nn.Linear(2, 2))
            return torch.rand(1).item()

    assert len(set(mw.simulate(elsewhere, 3, "rank"))) == 3
    assert len(set(mw.simulate(elsewhere, 3, "torch"))) == 1  # shared draws are the same
    random.seed(3)
    np.random.seed(4)
    mw.save_checkpoint(tmp_path, 2, nn.Linear(2, 2))
    expected = draws()
    draws()
    mw.load_checkpoint(tmp_path, nn.Linear(2, 2))
    assert draws() == expected


def test_a_model_state_alone_is_not_a_training_checkpoint(tmp_path: Path) -> None:
    mw.save_state_dict({"model": nn.Linear(2, 2).state_dict()}, tmp_path / "one")
    with pytest.raises(CheckpointError, match="save_checkpoint"):
        mw.load_checkpoint(tmp_path / "one", nn.Linear(2, 2))


def test_a_step_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    mw.save_checkpoint(tmp_path, 1, nn.Linear(2, 2))
    (tmp_path / "step_00000001").rename(tmp_path / "step_00000007")
    with pytest.raises(CheckpointError, match="rename the folder to step_00000001"):
        mw.load_checkpoint(tmp_path, nn.Linear(2, 2))
    (tmp_path / "step_00000007").rename(tmp_path / "best")
    assert mw.load_checkpoint(tmp_path / "best", nn.Linear(2, 2)).step == 1


def test_an_optimizer_with_other_groups_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    mw.save_checkpoint(tmp_path, 1, net, torch.optim.SGD(net.parameters(), lr=0.1))
    groups = [{"params": [net.weight]}, {"params": [net.bias]}]
    with torch.no_grad():
        net.weight.zero_()
    with pytest.raises(CheckpointError, match="parameter groups"):
        mw.load_checkpoint(tmp_path, net, torch.optim.SGD(groups, lr=0.1))
    assert not net.weight.any()


def test_options_and_learning_rates_are_restored(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    one = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.5), betas=(0.5, 0.6), weight_decay=0.3)
    mw.save_checkpoint(tmp_path, 1, net, one)
    other = torch.optim.AdamW(net.parameters())
    mw.load_checkpoint(tmp_path, net, other)
    group = other.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.5, 0.6), 0.3)
