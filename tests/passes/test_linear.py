"""Reductions move after linear operators, so that one replaces two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.passes import Linear, Scatter, Share

from .programs import CLOSE, after, counted, llama, mesh_of, mlp, mlp_batch, placed, step_of
from .steps import Step
from .test_share import twice

MESH = mesh_of(tp=2)


class Branches(nn.Module):
    """Three products, each summed over "tp" at once, and operators on the sums."""

    def __init__(self, join: Callable[..., Tensor], to: dict[str, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.join, self.to = join, to
        self.weights = nn.ParameterList(
            [nn.Parameter(mw.shard_tensor(torch.randn(8, 4), MESH, placed(MESH, tp=0))) for _ in range(3)]
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b, c = (mw.reshard(x @ w, MESH, placed(MESH, **self.to)) for w in self.weights)
        return (self.join(a, b, c) - y).square().mean()


def branches(join: Callable[..., Tensor], **to: int) -> Step:
    return step_of(lambda: Branches(join, to), mlp_batch(), 2)


@pytest.mark.parametrize(
    ("join", "sums"),
    [
        (lambda a, b, c: a + b + c, 1),
        (lambda a, b, c: a - b.mul(3.0) + (-c / 2), 1),
        (lambda a, b, c: (a.t() + b.t()).t() + c.view(4, 8).view(8, 4), 1),
        (lambda a, b, c: torch.add(a, b, alpha=2) + c, 1),
        (lambda a, b, c: a + b + c.tanh(), 2),
        (lambda a, b, c: a * b + c, 3),
        (lambda a, b, c: a + b + a.sin() + c, 3),
        (lambda a, b, c: (a + b).double() + c.double(), 2),
        (lambda a, b, c: (a + 1.0) + b + c, 3),
    ],
    ids=["sum", "scaled", "moved", "alpha", "tanh", "product", "used twice", "cast", "constant"],
)
def test_a_sum_is_reduced_once(join: Callable[..., Tensor], sums: int) -> None:
    step = branches(join)
    assert counted(step.programs[0], "forward") == {"AllReduce(tp)": 3}
    found = after(step, Linear())
    assert counted(found.program, "forward") == {"AllReduce(tp)": sums}
    assert found.error <= 10 * CLOSE
    if sums == 3:
        assert found.program is step.programs[0]


def test_reduce_scatters_and_gathers_are_merged_too() -> None:
    scattered = after(branches(lambda a, b, c: a + b * 2 - c, tp=0), Linear())
    assert counted(scattered.program, "forward") == {"ReduceScatter(tp)": 1}
    assert scattered.error <= 10 * CLOSE


def test_accumulated_gradients_are_reduced_at_the_end() -> None:
    """Two micro-batches gather the weight and scatter its gradient; at the end once for both."""
    step = twice()
    assert counted(step.programs[0]) == {"AllGather(dp)": 2, "AllReduce(dp)": 3}
    found = after(step, Scatter(), Share(), Linear())
    assert found.counts == {"AllGather(dp)": 1, "ReduceScatter(dp)": 1, "AllReduce(dp)": 1}
    assert found.error <= CLOSE
    told = found.changes_by("linear")
    assert [c.saved for c in told] == [{"bytes": 64, "rounds": 1}]


@pytest.mark.parametrize("step", [lambda: mlp(dp=4), lambda: llama(layers=1, dp=2, tp=2)], ids=["mlp", "llama"])
def test_steps_without_such_sums_are_unchanged(step: Callable[[], Step]) -> None:
    assert after(step(), Linear()).program is step().programs[0]
