"""A parameter keeps its hooks and its attributes when it is distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw

LAYS: dict[str, Any] = {
    "replicated": lambda name, module, mesh: None,
    "cut": lambda name, module, mesh: setattr(module, "weight", mw.shard_tensor(module.weight, mesh, [mw.Shard(0)])),
}


def _laid(lays: list[str], mesh: mw.ProcessMesh) -> tuple[Any, ...]:
    layer, seen = nn.Linear(4, 3), list[Any]()
    weight: Any = layer.weight
    weight._no_decay, weight.tag = True, "first"
    weight.register_hook(lambda grad: grad * 2)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.shape)))
    for how in lays:
        mw.shard_layer(layer, mesh, LAYS[how])
    laid: Any = layer.weight
    layer(torch.ones(2, 4)).sum().backward()
    return laid._no_decay, laid.tag, seen, laid.grad.tolist()


@pytest.mark.parametrize("lays", [["replicated"], ["cut"], ["replicated", "cut"], ["cut", "cut"]])
def test_a_distributed_parameter_keeps_hooks_and_attributes(lays: list[str]) -> None:
    mesh = mw.ProcessMesh([0, 1], ["tp"])
    wanted = True, "first", [(3, 4)], [[4.0] * 4] * 3
    assert mw.simulate(_laid, 2, lays, mesh) == [wanted, wanted]


@pytest.mark.parametrize("kind", ["parameter", "tensor"])
@pytest.mark.parametrize("first", [[], [mw.Replicate()], [mw.Shard(1)]])
@pytest.mark.parametrize("then", [[mw.Replicate()], [mw.Shard(0)]])
def test_a_distributed_tensor_keeps_its_gradient(kind: str, first: Any, then: Any) -> None:
    mesh = mw.ProcessMesh([0, 1], ["tp"])

    def on_rank() -> None:
        p: Any = nn.Parameter(torch.ones(3, 4)) if kind == "parameter" else torch.ones(3, 4, requires_grad=True)
        if first:
            p = mw.shard_tensor(p, mesh, first)
        x = torch.arange(12.0).view(3, 4)
        rows = mw.shard_tensor(x, mesh, [mw.Shard(0)]) if first else x
        (p * rows).sum().backward()
        laid: Any = mw.shard_tensor(p, mesh, then)
        torch.testing.assert_close(mw.unshard_dtensor(laid.grad), x)
        assert laid.grad.placements == laid.placements
        (laid * rows).sum().backward()
        torch.testing.assert_close(mw.unshard_dtensor(laid.grad), 2 * x)

    mw.simulate(on_rank, 2)


def test_a_distributed_module_keeps_its_gradients() -> None:
    mesh = mw.ProcessMesh([0, 1], ["tp"])

    def on_rank() -> None:
        for lay in (
            lambda net: mw.shard_layer(net, mesh, LAYS["cut"]),
            lambda net: mw.parallelize(net, None, mesh, mw.Parallelism({"": mw.ColwiseParallel()})),
        ):
            layer = nn.Linear(4, 3)
            layer(torch.ones(2, 4)).sum().backward()
            lay(layer)
            assert layer.weight.grad is not None
            assert layer.bias.grad is not None
            assert layer.weight.grad.tolist() == [[2.0] * 4] * 3
            assert layer.bias.grad.tolist() == [2.0] * 3

    mw.simulate(on_rank, 2)
