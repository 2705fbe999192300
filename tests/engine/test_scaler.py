"""Loss scaling for float16: torch's scaler on distributed gradients, whose ranks all make an update or all skip it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw

STEPS, OVERFLOW, ROW = 4, 1, 7
MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
StepReport = tuple[float, float, float]
"""Loss, gradient norm and scale after a step."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def batch(step: int, overflow: bool) -> Tensor:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    if overflow and step == OVERFLOW:
        x[ROW] = 1e30  # a row of the last rank of "dp"
    return x


def trained(
    net: nn.Module, optimizer: Any, overflow: bool, lay: Callable[[Tensor], Tensor], dtype: torch.dtype | None
) -> tuple[list[StepReport], list[list[Tensor]], dict[str, Any]]:
    """Return the scaler's report of each step, the parameters after it, and the scaler's state."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    told: list[StepReport] = []
    parameters: list[list[Tensor]] = []
    for step in range(STEPS):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = net(lay(batch(step, overflow))).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = mw.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        told.append((mw.unshard_dtensor(loss.detach()).item(), norm.item(), scaler.get_scale()))
        parameters.append([mw.unshard_dtensor(p.detach()).clone() for p in net.parameters()])
    return told, parameters, scaler.state_dict()


def one_device(overflow: bool, dtype: torch.dtype | None) -> Any:
    net = network()
    return trained(net, torch.optim.AdamW(net.parameters(), lr=0.01), overflow, lambda x: x, dtype)


def cut(overflow: bool, dtype: torch.dtype | None, stage: int = 0) -> Any:
    """Return the results of data and tensor parallelism, with a stage of ZeRO."""
    net = network()
    for layer, dim in ((net[0], 0), (net[2], 1)):
        layer.weight = mw.shard_tensor(layer.weight, MESH, [mw.Replicate(), mw.Shard(dim)])
    mw.shard_layer(net, MESH)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    stages: list[Any] = [
        None,
        mw.ShardingStage1("dp", 1),
        mw.ShardingStage2("dp", net, 1),
        mw.ShardingStage3("dp", net, 1),
    ]
    mw.shard_optimizer(optimizer, stages[stage])
    return trained(net, optimizer, overflow, lambda x: mw.shard_tensor(x, MESH, [mw.Shard(0)]), dtype)


def compare(found: Any, one: Any, rtol: float) -> None:
    for mine, theirs in zip(found[0], one[0], strict=True):
        assert mine == pytest.approx(theirs, rel=rtol, nan_ok=True)
    for mine, theirs in zip(found[1], one[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol)
    assert found[2] == one[2]


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
def test_numbers_are_those_of_one_device(overflow: bool, stage: int, dtype: torch.dtype | None) -> None:
    one = one_device(overflow, dtype)
    for found in mw.simulate(lambda: cut(overflow, dtype, stage), 4):
        compare(found, one, {None: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype])


def test_an_overflow_on_one_rank_stops_all_updates_and_halves_the_scale() -> None:
    found = mw.simulate(lambda: cut(overflow=True, dtype=torch.float16), 4)
    for told, parameters, _ in found:
        assert [scale for _, _, scale in told] == [1024.0, 512.0, 512.0, 1024.0]
        assert all(torch.equal(a, b) for a, b in zip(parameters[OVERFLOW - 1], parameters[OVERFLOW], strict=True))
        assert not torch.equal(parameters[OVERFLOW][0], parameters[OVERFLOW + 1][0])


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("clipped", [False, True])
def test_stages_of_a_pipeline_agree(stage: int, clipped: bool) -> None:
    """One number overflows on one rank of one stage only."""

    def go() -> tuple[float, list[bool]]:
        torch.manual_seed(0)
        mesh = mw.ProcessMesh([[0, 1], [2, 3]], ["pp", "dp"])
        net = mw.split_pipeline(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), mesh)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        before = [mw.unshard_dtensor(p.detach()).clone() for p in net.parameters()]
        x = mw.shard_tensor(torch.ones(8, 8), mesh["pp", 0], [mw.Shard(0)])
        scaler.scale(net(x).square().mean()).backward()
        weight = net[stage].weight
        weight.grad[0, 0] = torch.inf
        if clipped:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        after = [mw.unshard_dtensor(p.detach()) for p in net.parameters()]
        return scaler.get_scale(), [torch.equal(a, b) for a, b in zip(before, after, strict=True)]

    assert mw.simulate(go, 4) == [(512.0, [True] * 4)] * 4


def test_the_training_loop_skips_updates_and_saves_the_scale(tmp_path: Path) -> None:
    class Batches(list[Any]):
        """The batches of all steps, from the first one that is not done yet."""

        at = 0

        def __iter__(self) -> Any:
            while True:
                self.at += 1
                yield self[self.at - 1]

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    def go(steps: int, folder: Path | None) -> Any:
        net = mw.shard_layer(network(), MESH)
        data = Batches((mw.shard_tensor(batch(step, True), MESH, [mw.Shard(0)]),) * 2 for step in range(STEPS))
        events: list[Any] = []
        mw.train(
            net,
            torch.optim.AdamW(net.parameters(), lr=0.01),
            data,
            mw.Training(steps, folder, autocast=torch.float16, show=False),
            loss=lambda out, _: out.square().mean(),
            scaler=torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2),
            tell=events.append,
        )
        return [(e["loss"], e["loss_scale"]) for e in events if e["event"] == "step"]

    whole = mw.simulate(lambda: go(STEPS, None), 4)[0]
    assert [scale for _, scale in whole] == [1024.0, 1024.0, 512.0, 512.0]
    parts = mw.simulate(lambda: go(3, tmp_path), 4)[0] + mw.simulate(lambda: go(STEPS, tmp_path), 4)[0]
    assert [repr(step) for step in parts] == [repr(step) for step in whole]
