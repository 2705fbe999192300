"""Sums of which each rank keeps a part become reduce-scatters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.passes import Scatter

from .programs import CLOSE, after, counted, llama, llama_with, mesh_of, mlp, mlp_batch, placed, step_of
from .steps import Step

MESH = mesh_of(tp=2)


class Parted(nn.Module):
    """Two products summed over "tp"; the results are sharded along `dim`."""

    def __init__(self, between: Callable[..., Tensor], dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.between, self.dim = between, dim
        self.a, self.b = (nn.Parameter(mw.shard_tensor(torch.randn(8, 4), MESH, placed(MESH, tp=0))) for _ in range(2))
        self.bias = nn.Parameter(mw.shard_tensor(torch.randn(4), MESH, placed(MESH)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = (mw.reshard(x @ w, MESH, placed(MESH)) for w in (self.a, self.b))
        out = self.between(a, b, self.bias)
        return (mw.reshard(out, MESH, placed(MESH, tp=self.dim)) - y).square().mean()


def parted(between: Callable[..., Tensor], dim: int = 0, trains: bool = False) -> Step:
    return step_of(lambda: Parted(between, dim), mlp_batch(), 2, trains=trains)


@pytest.mark.parametrize(
    ("between", "dim", "sums", "scattered"),
    [
        (lambda a, b, c: a + b, 0, 0, 2),
        (lambda a, b, c: torch.tanh(a * 2) * b + c, 0, 0, 2),
        (lambda a, b, c: torch.tanh(a * 2) * b + 1, 1, 0, 2),
        (lambda a, b, c: torch.tanh(a) + b + c, 1, 2, 0),  # the bias would have to be sharded, too
        (lambda a, b, c: a * (b.sum() + 1), 0, 1, 1),
        (lambda a, b, c: a.softmax(0) + b.softmax(1), 0, 2, 0),
    ],
    ids=["sum", "bias repeated", "columns", "bias cut", "sum used whole", "softmax"],
)
def test_a_slice_moves_before_elementwise_operators(
    between: Callable[..., Tensor], dim: int, sums: int, scattered: int
) -> None:
    step = parted(between, dim)
    assert counted(step.programs[0])["AllReduce(tp)"] == 3  # one for the loss
    found = after(step, Scatter())
    assert found.counts.get("ReduceScatter(tp)", 0) == scattered
    assert found.counts["AllReduce(tp)"] == 1 + sums
    assert found.error <= CLOSE * 10
    if scattered:
        assert found.changes_by("scatter")[0].saved["bytes"] > 0


def test_values_needed_whole_in_the_backward_pass_stay_whole() -> None:
    """The gradient of tanh needs its result, that of a sum needs nothing."""
    assert after(parted(lambda a, b, c: torch.tanh(a) + b, trains=True), Scatter()).counts["AllReduce(tp)"] >= 2
    found = after(parted(lambda a, b, c: a + b, trains=True), Scatter())
    assert counted(found.program, "forward")["ReduceScatter(tp)"] == 2
    assert found.error <= CLOSE * 10


def test_sharded_states_need_sharded_gradients() -> None:
    step = llama_with(stage=1, dp=2)
    assert counted(step.programs[0])["AllReduce(dp)"] == 14
    found = after(step, Scatter())
    assert found.counts == {"AllReduce(dp)": 2, "ReduceScatter(dp)": 12, "AllGather(dp)": 12}
    assert found.is_equal


@pytest.mark.parametrize("step", [lambda: mlp(dp=4), lambda: llama(layers=1, dp=2, tp=2)], ids=["mlp", "llama"])
def test_whole_sums_stay_whole(step: Callable[[], Step]) -> None:
    assert after(step(), Scatter()).program is step().programs[0]


def test_a_partly_used_gathered_tensor_is_not_reduce_scattered() -> None:
    class Gathered(Parted):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = mw.reshard(mw.reshard(x, MESH, placed(MESH, tp=0)).sin(), MESH, placed(MESH))
            return (mw.reshard(x.tanh(), MESH, placed(MESH, tp=1)) * 2).square().sum()

    step = step_of(lambda: Gathered(lambda a: a, 0), mlp_batch(), 2, trains=False)
    assert counted(step.programs[0])["AllGather(tp)"] == 1
    assert after(step, Scatter()).program is step.programs[0]
