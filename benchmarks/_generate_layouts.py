"""Layouts for generation from models that contain no parallel code: meshes, marks and stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from math import prod
from typing import Any

import torch
from torch import nn

import meshwright as mw

SMALL = 16
"""ZeRO-3 does not shard tensors of fewer elements."""


@dataclass(frozen=True)
class GenerationLayout:
    """A mesh, and the configuration of `parallelize`; `weights` shards linear layers along `tp`, alternately."""

    axes: Mapping[str, int]
    weights: bool = False
    zero: int = 0

    @property
    def ranks(self) -> int:
        return prod(self.axes.values())

    def mesh(self) -> mw.ProcessMesh:
        """Return the mesh with these axes."""
        ids = torch.arange(self.ranks).reshape(tuple(self.axes.values()))
        return mw.ProcessMesh(ids.tolist(), list(self.axes))

    def put_on(self, model: nn.Module) -> nn.Module:
        """Make the model parallel, and return it."""
        return self.with_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.0) if self.zero else None)[0]

    def with_optimizer(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        """Make the model and its optimizer parallel, and return them."""
        plan = _styles(model) if self.weights else {}
        return mw.parallelize(model, optimizer, self.mesh(), mw.Parallelism(plan, zero=self.zero))


def _styles(model: nn.Module) -> dict[str, Any]:
    """Return styles that shard linear layers alternately by columns and rows, in the order of the modules."""
    turn = cycle((mw.ColwiseParallel(), mw.RowwiseParallel()))
    return {name: next(turn) for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name}


LAYOUTS: dict[str, GenerationLayout] = {
    "dp": GenerationLayout({"dp": 2}),
    "tp": GenerationLayout({"tp": 2}, weights=True),
    "dp×tp": GenerationLayout({"dp": 2, "tp": 2}, weights=True),
    "ZeRO-3": GenerationLayout({"dp": 2}, zero=3),
    "pp": GenerationLayout({"pp": 2}),
    "cp": GenerationLayout({"cp": 2}),
}
"""Name in the results → layout."""
