"""Consecutive conversions become the cheapest path from the first layout to the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.graph import Conversion
from meshwright.passes import Cancel

from .programs import after, counted, kind, llama, llama_with, mesh_of, mlp_batch, placed, step_of
from .steps import Step

MESH = mesh_of(dp=1, tp=2)


class Chain(nn.Module):
    """The product with a weight that is converted through several layouts."""

    def __init__(self, start: dict[str, int], ways: Sequence[dict[str, int]], between: Callable[[Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(mw.shard_tensor(torch.randn(8, 4), MESH, placed(MESH, **start)))
        self.ways, self.between = ways, between

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x @ self.weight
        for way in self.ways:
            x = self.between(mw.reshard(x, MESH, placed(MESH, **way)))
        return (x.sin() - y).square().sum()


def chain(start: dict[str, int], *ways: dict[str, int], between: Callable[[Tensor], Tensor] = lambda x: x) -> Step:
    return step_of(lambda: Chain(start, ways, between), mlp_batch(), 2)


@pytest.mark.parametrize(
    ("start", "ways", "before", "now"),
    [
        ({"tp": 1}, [{}, {"tp": 1}], {"AllGather(tp)": 1}, {}),
        ({"tp": 1}, [{}, {"tp": 0}], {"AllGather(tp)": 1}, {"AllToAll": 1}),
        ({"tp": 0}, [{}, {"tp": 0}], {"AllReduce(tp)": 1}, {"ReduceScatter(tp)": 1}),
        ({"tp": 0}, [{"tp": 0}, {}], {"ReduceScatter(tp)": 1, "AllGather(tp)": 1}, {"AllReduce(tp)": 1}),
        ({"tp": 0}, [{}, {}], {"AllReduce(tp)": 1}, None),
    ],
    ids=["gather slice", "gather slice elsewhere", "reduce slice", "scatter gather", "as cheap as it gets"],
)
def test_a_path_has_the_least_cost_for_its_ends(
    start: dict[str, int], ways: list[dict[str, int]], before: dict[str, int], now: dict[str, int] | None
) -> None:
    step = chain(start, *ways)
    assert counted(step.programs[0], "forward") == before
    found = after(step, Cancel())
    assert counted(found.program, "forward") == (before if now is None else now)
    assert found.error <= 1e-5  # of a loss of about 100


def test_views_that_change_nothing_are_ignored() -> None:
    step = chain({"tp": 1}, {}, {"tp": 1}, between=lambda x: x.view(x.shape))
    assert counted(after(step, Cancel()).program, "forward") == {}


def test_values_needed_elsewhere_stay() -> None:
    """The slice of a gathered tensor, if the whole one is also used."""
    step = chain({"tp": 1}, {}, between=lambda x: x.cos() + mw.reshard(x, MESH, placed(MESH, tp=1)))
    found = after(step, Cancel())
    assert counted(found.program, "forward") == counted(step.programs[0], "forward")
    assert counted(found.program, "forward")["AllGather(tp)"] >= 1


class SummedTwice(nn.Module):
    """A product that is summed along one axis of the mesh, and then along the other one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mesh = mesh_of(dp=2, tp=2)
        self.weight = nn.Parameter(mw.shard_tensor(torch.randn(8, 4), self.mesh, placed(self.mesh, dp=1, tp=0)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = (x @ self.weight).sum(1) / 1000
        for placements in ([mw.Partial(), mw.Replicate()], [mw.Replicate(), mw.Replicate()]):
            x = mw.reshard(x, self.mesh, placements)
        return (x - y.sum(1)).square().sum()


def test_sums_along_two_axes_become_one() -> None:
    step = step_of(SummedTwice, mlp_batch(), 4)
    found = after(step, Cancel())
    assert counted(step.programs[0], "forward") == {"AllReduce(tp)": 1, "AllReduce(dp)": 1}
    assert counted(found.program, "forward") == {"AllReduce(tp dp)": 1}
    assert found.error <= 1e-4
    assert "AllReduce(tp) · AllReduce(dp) is AllReduce(tp dp)" in found.changes_by("cancel")[0].what


def test_exchanges_with_other_stages_stay() -> None:
    step = llama(layers=2, pp=2, dp=2)
    found = after(step, Cancel())
    assert found.counts == counted(step.programs[0])


def test_gradients_used_only_in_parts_are_reduce_scattered() -> None:
    """ZeRO 1: states are sharded, so each rank needs its part of the gradient."""
    found = after(llama_with(stage=1, dp=2), Cancel())
    assert found.counts == {"AllReduce(dp)": 2, "ReduceScatter(dp)": 12, "AllGather(dp)": 12}
    assert found.is_equal


def test_a_path_that_enlarges_a_tensor_is_at_the_end_of_its_chain() -> None:
    """The small tensor is kept until then."""

    class Aside(Chain):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = x @ self.weight
            cut = mw.reshard(x, MESH, placed(MESH, tp=0))
            aside = x.cos()
            return (mw.reshard(cut, MESH, placed(MESH)).sin() - y).square().sum() + aside.sum()

    found = after(step_of(lambda: Aside({"tp": 1}, (), lambda x: x), mlp_batch(), 2, trains=False), Cancel())
    names = [kind(node.op.step) if isinstance(node.op, Conversion) else str(node.op) for node in found.program.nodes]
    assert "AllToAll" not in names
    assert names.index("aten.cos.default") < names.index("AllGather(tp)")
    assert found.error <= 1e-5
