"""Parameters in half precision with float32 copies, and states in the host's memory: the numbers of one device."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.engine import StaticError, StrategyError
from meshwright.engine.eager.master_weights import MASTER, HostStorage
from meshwright.engine.eager.optimizer import _STEP_WORK

STEPS = 4
MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def network(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """Return layers in half precision with a norm in float32 between them, and a frozen layer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 35), nn.GELU(), nn.Linear(35, 35), nn.Linear(35, 6)).to(dtype)
    net[3].requires_grad_(False)
    return net


def gradients(net: nn.Module, step: int) -> None:
    """Set the same gradients everywhere, in the dtype of each parameter, independent of the order of sums."""
    for at, p in enumerate(net.parameters()):
        if p.requires_grad:
            seeded = torch.Generator().manual_seed(100 * step + at)
            g = (torch.randn(p.shape, generator=seeded) * 0.01).to(p.dtype)
            p.grad = mw.shard_tensor(g, p.mesh, p.placements) if isinstance(p, mw.DistTensor) else g


def lay(net: nn.Sequential) -> nn.Sequential:
    for layer, dim in ((net[0], 0), (net[2], 1)):
        layer.weight = mw.shard_tensor(layer.weight, MESH, [mw.Replicate(), mw.Shard(dim)])
    return mw.shard_layer(net, MESH)


def stage(number: int, net: nn.Module) -> Any:
    kinds: list[Any] = [
        None,
        mw.ShardingStage1("dp", 1),
        mw.ShardingStage2("dp", net, 1),
        mw.ShardingStage3("dp", net, 1),
    ]
    return kinds[number]


def whole(x: Any) -> Tensor:
    return mw.unshard_dtensor(x.detach()).clone()


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, begin: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    for step in range(begin, STEPS):
        gradients(net, step)
        optimizer.step()
        optimizer.zero_grad()
    states = [optimizer.state[p] for p in net.parameters() if p in optimizer.state]
    return [whole(p) for p in net.parameters()], [whole(s[key]) for s in states for key in sorted(s) if key != "step"]


def by_hand(make: Make) -> list[Tensor]:
    """Return the results of the well-known recipe on one device: an optimizer of float32 copies."""
    net = network()
    copies = [p.detach().float().clone() for p in net.parameters()]
    optimizer = make([c for c, p in zip(copies, net.parameters(), strict=True) if p.requires_grad])
    for step in range(STEPS):
        gradients(net, step)
        for c, p in zip(copies, net.parameters(), strict=True):
            c.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for c, p in zip(copies, net.parameters(), strict=True):
                p.copy_(c)
    return [p.detach().clone() for p in net.parameters()]


class Far(HostStorage):
    """A memory that counts transfers; moved data can no longer be read at its old place."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.brought = self.here = self.most = 0

    def keep(self, x: Tensor, old: Tensor | None) -> Tensor:
        self.kept += 1
        self.here -= x.numel() if old is not None else 0
        there = torch.empty_like(x) if old is None else old
        there.copy_(x)
        x.fill_(torch.nan)
        return there

    def bring(self, x: Tensor, device: torch.device) -> Tensor:
        self.brought += 1
        self.here += x.numel()
        self.most = max(self.most, self.here)
        return x.clone()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", [False, True])
def test_numbers_are_those_of_one_device(name: str, number: int, offload: bool) -> None:
    make = OPTIMIZERS[name]
    wanted = by_hand(make)
    one = network()
    expected = trained(
        one, mw.shard_optimizer(make([p for p in one.parameters() if p.requires_grad]), master_weights=True)
    )
    for a, b in zip(expected[0], wanted, strict=True):
        assert torch.equal(a, b)

    def go() -> Any:
        net = lay(network())
        optimizer = make([p for p in net.parameters() if p.requires_grad])
        mw.shard_optimizer(optimizer, stage(number, net), master_weights=True, offload=offload)
        if offload:
            _STEP_WORK[optimizer].memory = Far()
            _STEP_WORK[optimizer].bucket = 4 * 100
        return trained(net, optimizer)

    for parameters, states in mw.simulate(go, 4):
        for mine, one_device in zip((*parameters, *states), (*expected[0], *expected[1]), strict=True):
            torch.testing.assert_close(mine, one_device, rtol=1e-5 if mine.dtype == torch.float32 else 1e-2, atol=1e-6)


def test_small_updates_are_not_lost() -> None:
    """Each update is below the precision of bfloat16 at 1."""
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    without = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizers = [
        mw.shard_optimizer(torch.optim.SGD([p], lr=1e-3), master_weights=True),
        torch.optim.SGD([without], lr=1e-3),
    ]
    for _ in range(100):
        p.grad, without.grad = torch.ones_like(p), torch.ones_like(p)
        for optimizer in optimizers:
            optimizer.step()
    assert without[0] == 1.0
    assert p[0].item() == pytest.approx(0.9, rel=4e-3)


def test_writes_to_a_parameter_from_outside_count() -> None:
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = mw.shard_optimizer(torch.optim.SGD([p], lr=1e-3), master_weights=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    with torch.no_grad():
        p[1:] = 4.0
    p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p][MASTER], torch.tensor([0.998, 3.999, 3.999, 3.999]))


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("how", ["checkpoint", "state_dict"])
def test_a_stopped_run_resumes(tmp_path: Path, number: int, how: str) -> None:
    make = OPTIMIZERS["adamw"]

    def made() -> Any:
        net = lay(network())
        optimizer = make([p for p in net.parameters() if p.requires_grad])
        return net, mw.shard_optimizer(optimizer, stage(number, net), master_weights=True, offload=True)

    def go() -> Any:
        net, optimizer = made()
        for step in range(2):
            gradients(net, step)
            optimizer.step()
        if how == "checkpoint":
            mw.save_checkpoint(tmp_path, 2, net, optimizer)
        other, fresh = made()
        if how == "checkpoint":
            mw.load_checkpoint(tmp_path, other, fresh)
        else:
            with torch.no_grad():
                for mine, theirs in zip(other.parameters(), net.parameters(), strict=True):
                    mine.copy_(theirs)
            fresh.load_state_dict(deepcopy(optimizer.state_dict()))
        return trained(net, optimizer, 2), trained(other, fresh, 2)

    for (parameters, states), found in mw.simulate(go, 4):
        assert all(map(torch.equal, parameters, found[0]))
        assert all(map(torch.equal, states, found[1]))


def test_states_are_transferred_bucket_by_bucket() -> None:
    """The device never holds more of them than those of a bucket, and of the parameter that fills it."""
    net = network(torch.float32)
    optimizer = mw.shard_optimizer(torch.optim.AdamW(net.parameters(), lr=0.01), offload=True)
    far = _STEP_WORK[optimizer].memory = Far()
    _STEP_WORK[optimizer].bucket = 4 * 300
    for step in range(2):
        gradients(net, step)
        optimizer.step()
    parameters = [p for p in net.parameters() if p.requires_grad]
    assert [*optimizer.param_groups[0]["params"]] == [*net.parameters()]
    assert far.kept == 2 * 2 * len(parameters), "two states of each, made and then brought"
    assert far.brought == 2 * len(parameters)
    assert far.most <= 2 * (300 + 35 * 35)
    assert far.most < 2 * sum(p.numel() for p in parameters)


class Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ArithmeticError


def test_a_step_after_a_failed_one_raises() -> None:
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = mw.shard_optimizer(Fails([p], lr=0.1), master_weights=True)
    p.grad = torch.ones_like(p)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    with pytest.raises(StrategyError, match="has not ended"):
        optimizer.step()


def test_impossible_options_are_refused() -> None:
    net = network()
    optimizer = mw.shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), master_weights=True)
    with pytest.raises(StrategyError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(StrategyError, match="one call"):
        mw.shard_optimizer(optimizer, offload=True)

    def static() -> None:
        step = mw.to_static(net, None, lambda out, y: (out.float() - y).square().mean(), optimizer)
        step(torch.ones(2, 6, dtype=torch.bfloat16), torch.ones(2, 6))

    with pytest.raises(StaticError, match="O2"):
        mw.simulate(static, 1)
