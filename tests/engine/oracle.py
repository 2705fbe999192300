"""One oracle: a program on a mesh has, on every rank, the results of one device.

A program takes a `Lay`. On one device it returns a tensor unchanged, on a mesh it distributes the tensor in the style's
layout. So the same lines run in both cases. Results are trees of tensors and Python values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import meshwright as mw
from meshwright.comm import current_communicator
from meshwright.tensor import DistTensor


@dataclass(frozen=True)
class Style:
    """A mesh, and the layout of a program's tensors on it."""

    shape: tuple[int, ...]
    placements: tuple[mw.Placement, ...]

    @property
    def mesh(self) -> mw.ProcessMesh:
        return mw.ProcessMesh(np.arange(self.ranks).reshape(self.shape), ["x", "y", "z"][: len(self.shape)])

    @property
    def ranks(self) -> int:
        return int(np.prod(self.shape))


STYLES = {
    "whole": Style((2,), (mw.Replicate(),)),
    "rows": Style((4,), (mw.Shard(0),)),
    "columns": Style((4,), (mw.Shard(-1),)),
    "terms": Style((2,), (mw.Partial(),)),
    "grid": Style((2, 2), (mw.Shard(0), mw.Shard(-1))),
    "twice": Style((2, 2), (mw.Shard(0), mw.Shard(0))),
}


class Lay:
    """A function that returns tensors unchanged."""

    style: Style | None = None

    def __call__(self, x: Tensor, grad: bool = False) -> Tensor:
        return x.clone().requires_grad_(grad)

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module


class LayOut(Lay):
    """A function that distributes tensors over the mesh; tensors without dims, or indivisible ones, are replicated."""

    def __init__(self, style: Style) -> None:
        self.style: Style = style

    def __call__(self, x: Tensor, grad: bool = False) -> Tensor:
        placements = self.style.placements if x.dim() else ()
        return mw.shard_tensor(x, self.style.mesh, placements, requires_grad=grad)

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Distribute parameters of two dims in the style's layout, without pending sums; replicate the others."""

        def cut(name: str, layer: torch.nn.Module, mesh: mw.ProcessMesh) -> None:
            for key, value in list(layer.named_parameters(recurse=False)):
                if value.dim() == 2 and not any(p.is_partial() for p in self.style.placements):
                    setattr(layer, key, mw.shard_tensor(value, mesh, self.style.placements))

        return mw.shard_layer(module, self.style.mesh, cut)


Program = Callable[[Lay], Any]


def whole(tree: Any) -> Any:
    """Return `tree` with every distributed tensor gathered; None and Python values stay."""
    if isinstance(tree, Tensor):
        assert type(tree) is not DistTensor or tree.mesh.size <= current_communicator().size
        return mw.unshard_dtensor(tree).detach().clone() if isinstance(tree, DistTensor) else tree.detach().clone()
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [whole(value) for value in tree]
    return tree


def run(program: Program, lay: Lay) -> Any:
    torch.manual_seed(7)
    return whole(program(lay))


def check(program: Program, style: Style, **close: float) -> None:
    """Check that every rank has the values, shapes and dtypes of one device."""
    expected = run(program, Lay())
    for found in mw.simulate(run, style.ranks, program, LayOut(style)):
        compare(found, expected, close)


def compare(found: Any, expected: Any, close: dict[str, float]) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, expected, **close)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            compare(found[key], expected[key], close)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            compare(one, other, close)
    elif isinstance(expected, float):
        torch.testing.assert_close(found, expected, **(close or {"rtol": 1e-5, "atol": 1e-6}))
    else:
        assert found == expected
