"""Gradient merge: a batch in pieces trains like the whole batch, with the activations of one piece."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.graph import Program, RewriteError, communication, count_ops, live_memory
from meshwright.models import Llama, mark
from meshwright.passes import FuseAccumulation, InPlace, Merge

from .steps import SMALL as TWO
from .test_inplace import Tied

SMALL = replace(TWO, layers=1)


OFF: dict[str, Any] = {"mp_optimization": {"enable": False}, "dp_optimization": {"enable": False}}


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, SMALL.vocab, (rows, 9), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def strategy_of(merge: Merge | None, **how: Any) -> mw.Strategy:
    pieces, average = (merge.pieces, merge.average) if merge else (1, True)
    section = {"enable": merge is not None, "k_steps": pieces, "avg": average, "fused": False}
    return mw.Strategy.of(gradient_merge=section, **how)


@cache
def trained(shape: tuple[int, int, int], merge: Merge | None, **how: Any) -> list[Any]:
    """Return for each rank: losses, parameters, and the program of the last of two steps."""

    def rank() -> Any:
        m = Llama(SMALL, 0)
        mark(m, mw.ProcessMesh(np.arange(int(np.prod(shape))).reshape(shape), ["pp", "dp", "tp"]))
        opt = torch.optim.SGD(m.parameters(), lr=0.1)
        dist = mw.to_static(m, None, None, opt, strategy=strategy_of(merge, **how))
        losses = [dist(*batch()) for _ in range(2)]
        return losses, [p.to_local().detach().clone() for p in m.parameters()], dist.program

    return mw.simulate(rank, int(np.prod(shape)))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 1)])
def test_pieces_train_like_the_whole_batch(shape: tuple[int, int, int]) -> None:
    whole, pieces = trained(shape, None), trained(shape, Merge(4))
    for (losses, parameters, _), (other, others, _) in zip(whole, pieces, strict=True):
        torch.testing.assert_close(losses, other)
        torch.testing.assert_close(parameters, others, rtol=1e-4, atol=1e-6)


def test_ranks_reduce_once_for_all_pieces() -> None:
    (_, _, whole), *_ = trained((1, 2, 1), None, inplace=False)
    (_, _, merged), *_ = trained((1, 2, 1), Merge(4), inplace=False)
    count = [len(list(communication(p, "backward"))) for p in (whole, merged)]
    assert count[1] == count[0]


def test_one_piece_of_activations_lives_at_a_time() -> None:
    def values(merge: Merge | None) -> int:
        ((_, _, program),) = trained((1, 1, 1), merge)
        live = live_memory(program)
        return live.peak_in("forward", "backward") - live.held

    one, two, four = (values(merge) for merge in (None, Merge(2), Merge(4)))
    parameters = sum(i.value.nbytes for i in trained((1, 1, 1), None)[0][2].inputs if i.role == "parameter")
    assert two - parameters < 0.6 * one
    assert four - parameters < 0.6 * two


def test_merged_gradients_are_those_of_an_eager_loop() -> None:
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(2))

    def model() -> tuple[Any, Any]:
        torch.manual_seed(0)
        m = Tied()
        return m, torch.optim.SGD(m.parameters(), lr=0.1)

    def eager(average: bool) -> list[Tensor]:
        m, opt = model()
        for _ in range(3):
            for piece in x.chunk(3):
                (m(piece) / (3 if average else 1)).backward()
            opt.step()
            opt.zero_grad()
        return list(m.state_dict().values())

    def static(average: bool) -> list[Tensor]:
        m, opt = model()
        dist = mw.to_static(m, None, None, opt, strategy=strategy_of(Merge(3, average)))
        for _ in range(3):
            dist(x)
        return list(m.state_dict().values())

    for average in (True, False):
        torch.testing.assert_close(mw.simulate(static, 1, average), mw.simulate(eager, 1, average))


def test_pieces_must_have_equal_sizes() -> None:
    with pytest.raises(RewriteError, match="7 rows"):
        Merge(4).piece((torch.ones(7, 2),), 0)
    with pytest.raises(RewriteError, match="0 pieces"):
        Merge(0)
    mask, rows = torch.ones(3, 3), torch.ones(8, 2)
    assert [tuple(x.shape) for x in Merge(4).piece((rows, mask), 0)] == [(2, 2), (3, 3)]


@pytest.mark.parametrize("second", [[mw.Replicate()], [mw.Shard(1)]])
def test_a_rank_takes_the_same_rows_of_all_tensors(second: list[mw.Placement]) -> None:
    def step() -> None:
        mesh = mw.ProcessMesh([0, 1], ["dp"])
        model = mw.shard_layer(nn.Linear(4, 4), mesh)
        x, y = mw.shard_tensor(torch.ones(8, 4), mesh, [mw.Shard(0)]), mw.shard_tensor(torch.ones(8, 4), mesh, second)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        mw.to_static(model, None, F.mse_loss, optimizer, strategy_of(Merge(2)))(x, y)

    with pytest.raises(RewriteError, match="would take other rows"):
        mw.simulate(step, 2)


def test_it_works_with_in_place_reuse() -> None:
    ((losses, _, program),) = trained((1, 1, 1), Merge(2), inplace=True)
    assert any(c.by == InPlace.name for c in program.changes)
    assert any(c.by == "merge" for c in program.changes)
    assert losses[1] < losses[0]


def test_matrix_products_accumulate_gradients() -> None:
    losses: dict[bool, list[float]] = {}
    for fused in (False, True):
        strategy = strategy_of(Merge(2), passes=[FuseAccumulation()] if fused else [], inplace=False, **OFF)

        def train(strategy: mw.Strategy = strategy) -> tuple[list[float], Program]:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
            step = mw.to_static(model, None, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
            x, y = torch.randn(8, 6), torch.randint(4, (8,))
            return [step(x, y).item() for _ in range(3)], step.program

        losses[fused], program = mw.simulate(train, 1)[0]
        found = count_ops([n for n in program.nodes if n.origin.phase == "backward"])
        assert found.get("aten.addmm.default", 0) == (2 if fused else 0)
    assert losses[True] == pytest.approx(losses[False], rel=1e-6)
