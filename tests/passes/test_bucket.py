"""Buckets: fewer collectives, the same bits, and as early as their members permit."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.graph import Conversion, Program
from meshwright.passes import Bucket, Regather, Scatter, SequenceParallel

from .programs import MLP, after, bare, counted, llama, llama_with, mesh_of, mlp, mlp_batch, placed, step_of
from .steps import Step


def test_gradients_are_one_bucket_and_the_same_bits() -> None:
    found = after(mlp(dp=4), Bucket())
    assert counted(mlp(dp=4).programs[0]) == {"AllReduce(dp)": 5}
    assert found.counts == {"AllReduce(dp)": 1}  # the loss is in the same bucket
    assert found.is_equal
    assert [str(c) for c in found.changes_by("bucket")] == [
        "bucket: 5 × AllReduce(dp) merged into one of 852 bytes at backward (4 rounds)"
    ]


def test_uneven_batches_are_bucketed_too() -> None:
    found = after(mlp(rows=7, dp=3), Bucket())
    assert found.counts == {"AllReduce(dp)": 1}
    assert found.is_equal


def test_a_llama_reduces_its_gradients_once() -> None:
    """One bucket along dp, in addition to the number of tokens, which the loss needs at once."""
    found = after(llama(layers=1, dp=2, tp=2), Bucket())
    assert found.counts == {"AllReduce(tp)": 6, "AllReduce(dp)": 2, "AllGather(tp)": 1}
    assert found.is_equal


def test_stages_have_buckets_of_their_own() -> None:
    found = after(llama(layers=2, pp=2, dp=2), Bucket())
    assert found.counts["AllReduce(dp)"] == 1
    assert found.is_equal


def test_a_full_bucket_is_sent_during_the_backward_pass() -> None:
    """A full bucket does not wait for gradients that are computed later."""
    program = after(llama(layers=1, dp=2), Bucket(bytes=8192)).program
    at = [n for n, node in enumerate(program.nodes) if is_sum(node.op)]
    products = [n for n, node in enumerate(program.nodes) if str(node.op) == "aten.mm.default"]
    assert 5 <= len(at) < 13
    assert sum(n < products[-1] for n in at) >= len(at) - 3


def is_sum(op: Any) -> bool:
    return isinstance(op, Conversion) and repr(op.step) == "AllReduce(dp)"


def test_urgent_collectives_do_not_wait_for_a_bucket() -> None:
    """Sums over tp of the norms' gradients are needed in the update: none of them shares a bucket with urgent ones."""
    step = llama_with(SequenceParallel("tp"), tp=2)
    found = after(step, Bucket())
    before = counted(step.programs[0], "backward")
    backward = counted(found.program, "backward")
    assert before == {"ReduceScatter(tp)": 3, "AllGather(tp)": 3, "AllReduce(tp)": 3}
    assert backward == {
        "ReduceScatter(tp)": 3,
        "AllGather(tp)": 3,
        "AllReduce(tp)": 1,
    }  # three norms in one
    assert found.is_equal


class Scaled(nn.Module):
    """A replicated layer, a layer sharded by columns, and a number that scales the results of the second layer."""

    def __init__(self, mesh: mw.ProcessMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(1))
        self.weight = nn.Parameter(mw.shard_tensor(torch.randn(8, 16), mesh, placed(mesh, tp=1)))
        mw.shard_layer(self, mesh)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (torch.tanh(self.first(x)) @ self.weight * self.scale).square().mean() + y.mean()


def test_a_gradient_needed_by_the_backward_pass_is_sent_alone() -> None:
    """Loss and gradient of the scale may wait for the update; the gradient of the first layer's results may not."""
    mesh = mesh_of(tp=2)
    step = step_of(lambda: Scaled(mesh), mlp_batch(), 2)
    assert counted(step.programs[0], "backward") == {"AllReduce(tp)": 3}
    found = after(step, Bucket())
    assert counted(found.program, "backward") == {"AllReduce(tp)": 2}
    assert found.is_equal


@pytest.mark.parametrize("dim", [0, 1])
def test_gathers_and_scatters_of_any_dim(dim: int) -> None:
    step = gathered(dim)
    assert counted(step.programs[0]) == {"AllGather(dp)": 3, "AllReduce(dp)": 4}
    found = after(step, Scatter(), Bucket())
    assert found.counts == {"AllGather(dp)": 1, "ReduceScatter(dp)": 1, "AllReduce(dp)": 1}
    assert found.is_equal


class Gathered(nn.Module):
    """Three layers whose weights are sharded, and gathered at use."""

    def __init__(self, mesh: mw.ProcessMesh, dim: int, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mesh = mesh
        make = [torch.randn(8, width), torch.randn(width, width), torch.randn(width, 4)]
        self.weights = nn.ParameterList([nn.Parameter(mw.shard_tensor(w, mesh, placed(mesh, dp=dim))) for w in make])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = (mw.reshard(t, self.mesh, placed(self.mesh, dp=0)) for t in (x, y))
        for w in self.weights:
            x = torch.tanh(x @ mw.reshard(w, self.mesh, placed(self.mesh)))
        return (x - y).square().mean()


@cache
def gathered(dim: int, width: int = 8) -> Step:
    mesh = mesh_of(dp=2)
    return step_of(lambda: Gathered(mesh, dim, width), mlp_batch(), 2)


def test_uneven_parts_are_not_bucketed() -> None:
    """Of a width of 7 the ranks hold 4 and 3."""
    found = after(gathered(1, 7), Scatter(), Bucket())
    assert found.counts == {"AllGather(dp)": 3, "ReduceScatter(dp)": 3, "AllReduce(dp)": 1}
    assert found.is_equal


@pytest.mark.parametrize(
    ("stage", "counts"),
    [
        (1, {"AllReduce(dp)": 2, "ReduceScatter(dp)": 1, "AllGather(dp)": 1}),
        (3, {"AllReduce(dp)": 2, "ReduceScatter(dp)": 1, "AllGather(dp)": 2}),
    ],
)
def test_zero_sends_everything_in_buckets(stage: Any, counts: dict[str, int]) -> None:
    step = llama_with(stage=stage, dp=2)
    found = after(step, Regather(), Scatter(), Bucket())
    assert found.counts == counts
    assert found.is_equal


def test_a_bucket_respects_its_largest_size() -> None:
    found = after(mlp(dp=4), Bucket(bytes=600))
    sizes = [node.ins[0].nbytes for node in found.program.nodes if is_sum(node.op)]
    assert sizes == [336, 516]
    assert found.is_equal


def test_a_program_for_one_rank_is_unchanged() -> None:
    mesh = mesh_of(dp=1)
    step = step_of(lambda: MLP(mesh), mlp_batch(), 1)
    assert [Bucket()(p) is p for p in step.programs] == [True]


def test_to_static_accepts_the_pass() -> None:
    def train(*passes: Any) -> tuple[list[float], Program]:
        model = MLP(mesh_of(dp=2))
        step = mw.to_static(model, None, None, torch.optim.AdamW(model.parameters()), strategy=bare(*passes))
        return [step(*mlp_batch()).item() for _ in range(3)], step.program

    plain, bucketed = (mw.simulate(lambda p=passes: train(*p), 2)[0] for passes in ((), (Bucket(),)))
    assert plain[0] == bucketed[0]
    assert counted(bucketed[1]) == {"AllReduce(dp)": 1}
