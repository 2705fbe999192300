"""A parameter that is laid on a mesh keeps its hooks and its attributes."""

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
def test_a_laid_parameter_keeps_hooks_and_attributes(lays: list[str]) -> None:
    mesh = mw.ProcessMesh([0, 1], ["tp"])
    wanted = True, "first", [(3, 4)], [[4.0] * 4] * 3
    assert mw.simulate(_laid, 2, lays, mesh) == [wanted, wanted]
