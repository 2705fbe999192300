"""Steps that the device replays: bits, allocations, races, changes that record again, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import DeviceGraph, has_graphs
from meshwright.errors import StaticError, StrategyError
from tests.device.communicator import run_on_devices
from tests.device.inspection import Devices
from tests.device.training import Training

pytestmark = pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="graphs need torch 2.13")

DEVICE = "mesh:0"
RANKS, STEPS = 2, 5
KINDS = ("dp", "tp", "ZeRO-3", "pp")


def _strategy(kind: str, **options: Any) -> mw.Strategy:
    pipeline = {"enable": True, "accumulate_steps": 2, "schedule_mode": "1F1B"} if kind == "pp" else {}
    return mw.Strategy.of(pipeline=pipeline, **options)


def _trained(kind: str, device: torch.device, replays: bool) -> list[Tensor]:
    """Return losses and parameters of steps with another batch, another learning rate and moved states in between."""
    strategy = _strategy(kind, cuda_graph=replays)
    training = Training(kind, True, device, strategy=strategy, capturable=True)
    losses = [training.step() for _ in range(STEPS)]
    losses += [training.step(*(x * 2 for x in training.batch)) for _ in range(2)]
    training.optimizer.param_groups[0]["lr"] = 0.1
    losses += [training.step() for _ in range(3)]
    for states in training.optimizer.state.values():
        states["exp_avg"] = states["exp_avg"].clone()
    losses += [training.step() for _ in range(3)]
    return [*(torch.tensor(float(x), device="cpu") for x in losses), *training.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_without_replays(mesh_device: Devices, kind: str) -> None:
    expected, found = (
        mw.simulate(run_on_devices(lambda device, replays=replays: _trained(kind, device, replays)), RANKS)
        for replays in (False, True)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_a_replay_allocates_only_the_result(mesh_device: Devices) -> None:
    def program(device: torch.device) -> None:
        training = Training("dp", True, device, strategy=_strategy("dp", cuda_graph=True), capturable=True)
        for _ in range(3):
            training.step()
        for _ in range(2):
            with mesh_device.counting() as counted:
                training.step()
            assert counted.counts.allocations == 1
            assert counted.counts.host_reads == counted.counts.host_waits == 0
            assert counted.counts.launches > 10

    mw.simulate(run_on_devices(program), 1)


def test_a_learning_rate_in_a_tensor_may_change_between_replays(mesh_device: Devices) -> None:
    def program(device: torch.device) -> None:
        rate = torch.tensor(0.01, device=device)
        step = _step(nn.Tanh(), device, lr=rate, capturable=True)
        for _ in range(3):
            step()
        rate.mul_(0.5)
        with mesh_device.counting() as counted:
            step()
        assert counted.counts.allocations == 1  # the result of a replay

    mw.simulate(run_on_devices(program), 1)


def test_a_graph_runs_only_in_replays(mesh_device: Devices) -> None:
    assert has_graphs(torch.device(DEVICE))
    x = torch.ones(3, device=DEVICE)
    graph = DeviceGraph(lambda: (x * 2).add_(1) @ x, x.device)
    for factor in (1.0, 2.0):
        x.fill_(factor)
        graph.replay()
        assert graph.result.item() == 3 * factor * (2 * factor + 1)


def test_a_stream_of_a_graph_must_be_waited_for(mesh_device: Devices) -> None:
    side = torch.Stream(DEVICE)
    x = torch.ones(3, device=DEVICE)

    def work(joins: bool) -> Tensor:
        here = torch.accelerator.current_stream(DEVICE)
        y = x * 2
        side.wait_event(here.record_event())
        with side:
            y.mul_(3)
        if joins:
            here.wait_event(side.record_event())
        return y + 1

    joined = DeviceGraph(lambda: work(True), x.device)
    for _ in range(2):
        joined.replay()
    assert joined.result.tolist() == [7.0] * 3
    assert not mesh_device.take_races()
    DeviceGraph(lambda: work(False), x.device).replay()
    assert mesh_device.take_races()


def _waits_on_the_host(x: Tensor) -> object:
    return torch.accelerator.synchronize()


def _on_another_stream(x: Tensor) -> None:
    with torch.Stream(DEVICE):
        x.add_(1)


NEEDS_HOST: dict[str, Callable[[Tensor], object]] = {
    "reads values to the host": torch.nonzero,
    "waits for a stream": _waits_on_the_host,
    "draws random numbers": torch.rand_like,
    "make the stream wait": _on_another_stream,
}


@pytest.mark.parametrize("words", NEEDS_HOST)
def test_work_of_the_host_cannot_be_recorded(mesh_device: Devices, words: str) -> None:
    x = torch.ones(3, device=DEVICE)
    with pytest.raises(RuntimeError, match=words):
        DeviceGraph(lambda: NEEDS_HOST[words](x), x.device)
    assert DeviceGraph(lambda: x + 1, x.device) is not None  # the failed recording has ended


def _step(module: nn.Module, device: torch.device, **optimizer: Any) -> Callable[[], object]:
    model = nn.Sequential(nn.Linear(4, 4), module).to(device)
    mw.shard_layer(model, mw.ProcessMesh([0], ["dp"]))
    adam = torch.optim.AdamW(model.parameters(), **optimizer)
    step = mw.to_static(model, None, nn.functional.mse_loss, adam, mw.Strategy(cuda_graph=True))
    x = torch.ones(2, 4, device=device)
    return lambda: step(x, x)


REFUSED: dict[str, Callable[[torch.device], Callable[[], object]]] = {
    "fix: .*capturable=True": lambda device: _step(nn.Tanh(), device),
    "random numbers": lambda device: _step(nn.Dropout(0.5), device, capturable=True),
    "a program on cpu": lambda device: _step(nn.Tanh(), torch.device("cpu")),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_step_that_needs_the_host_is_refused(mesh_device: Devices, words: str) -> None:
    def program(device: torch.device) -> None:
        step = REFUSED[words](device)
        for _ in range(2):
            step()

    with pytest.raises(StaticError, match=words):
        mw.simulate(run_on_devices(program), 1)


@pytest.mark.parametrize("options", [{"compiler": "inductor"}, {"amp": {"enable": True, "dtype": "float16"}}])
def test_options_that_need_the_host_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(StrategyError, match="cuda_graph = true"):
        mw.Strategy.of(cuda_graph=True, **options)
