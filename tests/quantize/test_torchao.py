"""torchao's quantize_ on a marked model: an error says what to write instead. A small class stands for torchao's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw

MESH = mw.ProcessMesh([0, 1], ["tp"])


class Int8Tensor(Tensor):
    """A tensor without memory of its own, as torchao's classes are."""

    __module__ = "torchao.quantization"

    @staticmethod
    def __new__(cls: type, held: Tensor) -> Int8Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)  # pyright: ignore[reportAttributeAccessIssue]

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Int8Tensor(args[0].held)
        raise NotImplementedError(str(func))


def quantized() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(Int8Tensor(torch.ones(4, 4)), requires_grad=False)
    return model


def columns(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
    if isinstance(layer, nn.Linear):
        layer.weight = mw.shard_tensor(layer.weight, mesh, [mw.Shard(0)])


def multiply() -> object:
    return quantized()(mw.shard_tensor(torch.ones(4, 4), MESH, [mw.Shard(0)]))


def quantize_marked() -> object:
    with torch.library._scoped_library("torchao", "FRAGMENT") as library:
        library.define("choose_scale(Tensor x) -> Tensor")
        library.impl("choose_scale", lambda x: x.abs().amax(), "CompositeExplicitAutograd")
        return torch.ops.torchao.choose_scale(mw.shard_tensor(torch.ones(4, 4), MESH, [mw.Shard(0)]))


@pytest.mark.parametrize(
    "act",
    [
        lambda: mw.shard_layer(quantized(), MESH, columns),
        lambda: mw.shard_layer(quantized(), MESH),
        lambda: mw.shard_tensor(quantized()[0].weight, MESH, [mw.Shard(0)]),  # pyright: ignore[reportIndexIssue]
        multiply,
        quantize_marked,
    ],
    ids=["shard_layer", "replicated", "shard_tensor", "a distributed input", "an operator"],
)
def test_torchao_is_refused_with_what_to_write(act: Callable[[], object]) -> None:
    def program() -> None:
        with pytest.raises(mw.errors.OperationError) as caught:
            act()
        assert "mw.quantize" in caught.value.write

    mw.simulate(program, 2)
