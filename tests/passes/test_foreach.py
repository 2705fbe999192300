"""Operators on lists: the same bits as one by one, for every optimizer and for parameters of several groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.graph import RewriteError, count_ops
from meshwright.passes import Foreach, InPlace

from .steps import assert_same, llama_step, plain, recorded
from .test_inplace import OPTIMIZERS, Tied


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 2)])
def test_a_step_keeps_its_bits(shape: tuple[int, int, int]) -> None:
    step = llama_step(shape)
    programs = step.changed(Foreach())
    assert_same(step, programs)
    assert_same(step, step.changed(lambda p: InPlace()(Foreach()(p))))


def test_each_part_of_the_formula_is_one_operator() -> None:
    step = llama_step((1, 1, 1))
    (program,) = step.changed(lambda p: Foreach()(p, deep=True))
    found = count_ops([n for n in program.nodes if n.origin.phase == "update"])
    trained = sum(i.role == "parameter" for i in program.inputs)
    assert trained == 21
    lists = {name: n for name, n in found.items() if "_foreach" in name}
    assert lists == {
        "aten._foreach_add.Scalar": 2,
        "aten._foreach_mul.Scalar": 2,
        "aten._foreach_lerp.Scalar": 1,
        "aten._foreach_addcmul.Scalar": 1,
        "aten._foreach_sqrt.default": 1,
        "aten._foreach_div.ScalarList": 1,
        "aten._foreach_addcdiv.ScalarList": 1,
    }
    assert program.changes[-1].saved["operators"] == 9 * (trained - 1)
    assert {name for name in found if name not in lists and "aten" in name} == {"aten._local_scalar_dense.default"}


@pytest.mark.parametrize(("optimizer", "how"), OPTIMIZERS, ids=str)
def test_every_optimizer_keeps_its_bits(optimizer: str, how: dict[str, Any]) -> None:
    step = recorded(Tied, (torch.randn(5, 6),), 1, optimizer, **how)
    assert_same(step, step.changed(Foreach()))
    assert_same(step, step.changed(lambda p: InPlace()(Foreach()(p))))


def test_groups_with_options_of_their_own_keep_them() -> None:
    def train(*how: Any) -> list[float]:
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        groups = [{"params": m[0].parameters(), "lr": 0.1}, {"params": m[1:].parameters(), "weight_decay": 0.0}]
        opt = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.5)
        strategy = plain(passes=how)
        dist = mw.to_static(m, None, lambda out, label: (out - label).square().mean(), opt, strategy=strategy)
        for at in range(4):
            opt.param_groups[0]["lr"] *= 0.5
            dist(torch.ones(2, 4) * at, torch.zeros(2, 4))
        if how:
            assert any("_foreach" in name for name in count_ops(dist.program.nodes))
        return [x for p in m.parameters() for x in p.detach().flatten().tolist()]

    assert mw.simulate(train, 1, Foreach()) == mw.simulate(train, 1)


def test_few_operators_stay_alone() -> None:
    program = llama_step((1, 1, 1)).programs[0]
    assert Foreach(least=100)(program) is program


def test_it_runs_before_in_place_reuse() -> None:
    program = InPlace()(llama_step((1, 1, 1)).programs[0])
    with pytest.raises(RewriteError, match="InPlace as the last pass"):
        Foreach()(program)


class Thin(nn.Module):
    """Two columns in one part, which the update needs as a whole; the loss needs one of them only."""

    def __init__(self, mesh: mw.ProcessMesh) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 4, bias=False), nn.Linear(1, 4, bias=False)
        for layer in (self.a, self.b):
            layer.weight = mw.shard_tensor(nn.Parameter(torch.linspace(1, 2, 4).unsqueeze(1)), mesh, [mw.Shard(1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.a.weight * self.b.weight.sum()).square().mean()


def test_mutually_dependent_groups_are_not_merged() -> None:
    mesh = mw.ProcessMesh([0, 1, 2, 3], ["tp"])

    def train(foreach: bool) -> list[float]:
        model = Thin(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = mw.to_static(model, None, None, optimizer, mw.Strategy(foreach=foreach))
        return [step(mw.shard_tensor(torch.ones(3, 4), mesh, [])).item() for _ in range(3)]

    assert mw.simulate(train, 4, True) == mw.simulate(train, 4, False)
