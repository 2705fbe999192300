"""Sums over nodes and the ranks in them become three steps."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.passes import Bucket, Hierarchy

from .programs import CLOSE, after, counted, llama, mesh_of, mlp_batch, step_of
from .steps import Step

SPLIT = Hierarchy(inner=("gpu",), outer=("node",), least=0)


class Nodes(nn.Module):
    """A batch that is sharded over nodes, and over the ranks of each."""

    def __init__(self, mesh: mw.ProcessMesh, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mesh = mesh
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 4)
        mw.shard_layer(self, mesh)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = (mw.reshard(t, self.mesh, [mw.Shard(0), mw.Shard(0)]) for t in (x, y))
        return F.mse_loss(self.down(torch.relu(self.up(x))), y)


@cache
def nodes(width: int = 8, node: int = 2, gpu: int = 2) -> Step:
    mesh = mesh_of(node=node, gpu=gpu)
    return step_of(lambda: Nodes(mesh, width), mlp_batch(), mesh.size)


@pytest.mark.parametrize("width", [8, 5])
def test_a_sum_crosses_nodes_in_pieces(width: int) -> None:
    """Pieces may be uneven: a weight of 5 × 8 and a bias of 5 are split in two."""
    assert counted(nodes(width).programs[0]) == {"AllReduce(gpu node)": 5}
    found = after(nodes(width), SPLIT)
    assert found.counts == {"ReduceScatter(gpu)": 5, "AllReduce(node)": 5, "AllGather(gpu)": 5}
    assert found.error <= CLOSE


def test_the_record_has_the_saved_bytes_between_nodes() -> None:
    """Of 256 bytes a ring over all four ranks sends 384 each; now half of them crosses once: 128."""
    (change, *_) = [c for c in after(nodes(), SPLIT).changes_by("hierarchy") if c.saved["bytes over outer axes"] == 256]
    assert "is ReduceScatter(gpu, dim 0) · AllReduce(node) · AllGather(gpu, dim 0)" in change.what


def test_small_sums_take_one_step() -> None:
    found = after(nodes(), Hierarchy(inner=("gpu",), outer=("node",), least=100))
    assert found.counts == {
        "ReduceScatter(gpu)": 2,
        "AllReduce(node)": 2,
        "AllGather(gpu)": 2,
        "AllReduce(gpu node)": 3,
    }


def test_buckets_are_split_as_a_whole() -> None:
    found = after(nodes(), Bucket(), SPLIT)
    assert found.counts == {"ReduceScatter(gpu)": 1, "AllReduce(node)": 1, "AllGather(gpu)": 1}
    assert found.error <= CLOSE


def test_sums_over_one_kind_of_link_stay() -> None:
    step = llama(layers=1, dp=2, tp=2)
    assert counted(after(step, Hierarchy(inner=("tp",), outer=("dp",))).program) == counted(step.programs[0])
    found = after(step, Hierarchy(inner=("tp",), outer=("dp",), least=0))
    assert found.counts["AllReduce(tp)"] == counted(step.programs[0])["AllReduce(tp)"]
    assert found.error <= CLOSE
