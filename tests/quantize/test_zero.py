"""Quantization of a model under ZeRO-3: codes, values and gradients of one device, and the units after it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.quantize import Scheme
from tests.engine.block_net import Net

from .models import INT4, batches, differences, state_of

WIDTH, INNER = 64, 96
SCHEMES = {"nearest": Scheme(INT4), "gptq": Scheme(INT4, method="gptq"), "awq": Scheme(INT4, method="awq")}
MESH = mw.ProcessMesh([0, 1], ["dp"])


def net() -> Net:
    return Net(3, WIDTH, INNER, 32)


def shard(model: nn.Module, units: Any = None) -> None:
    """Shard all parameters by ZeRO-3 over two ranks."""
    mw.shard_layer(model, MESH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mw.shard_optimizer(optimizer, mw.ShardingStage3("dp", model, 1, units))


def rows(seed: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))


def sharded_rows(seed: int) -> Tensor:
    return mw.shard_tensor(rows(seed), MESH, [mw.Shard(0)])


def result(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the values of a model and the gradients of its parameters, whole."""
    model.zero_grad()
    values = model(x)
    values.square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [mw.unshard_dtensor(each.detach()) for each in (values, *gradients)]


@pytest.mark.parametrize("units", [None, ["blocks.*", ("first", "last")], [("first", "blocks.0"), "blocks.0.*"]])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_values_and_gradients_are_those_of_one_device(scheme: str, units: Any) -> None:
    one = mw.quantize(net(), SCHEMES[scheme], batches())
    expected = [result(one, rows(seed)) for seed in range(2)]

    def program() -> tuple[list[str], list[list[Tensor]]]:
        model = net()
        shard(model, units)
        result(model, sharded_rows(9))
        mw.quantize(model, SCHEMES[scheme], batches())
        return differences(state_of(one), state_of(model)), [result(model, sharded_rows(seed)) for seed in range(2)]

    for different, values in mw.simulate(program, 2):
        assert different == []
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("units", [None, ["blocks.*", ("first", "last")]])
def test_units_gather_the_parameters_that_are_left(units: Any) -> None:
    """The weights are freed, and one call gathers the biases and the norm of a block: four gathers become one."""

    def program() -> tuple[int, int]:
        model = net()
        shard(model, units)
        result(model, sharded_rows(0))
        weights = [weakref.ref(m.weight) for m in model.modules() if isinstance(m, nn.Linear)]
        mw.quantize(model, Scheme.preset("int8", ignore=()))
        result(model, sharded_rows(1))
        block: Any = model.blocks[1]
        alone = gathers(lambda x: block.norm(block.down(block.up(x))))
        return sum(weight() is not None for weight in weights), alone - gathers(block)

    assert mw.simulate(program, 2) == [(0, 3)] * 2


@torch.no_grad()
def gathers(act: Callable[[Tensor], Tensor]) -> int:
    """Return the number of all-gathers of this rank while `act` runs."""
    with mw.trace_comm() as trace:
        act(sharded_rows(2))
    return sum(call.kind == "all_gather" for call in trace.calls)
