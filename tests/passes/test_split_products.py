"""Products in pieces: the same numbers, a collective per piece, and one piece in flight while the next is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.cost import cluster_of
from meshwright.graph import Program, RewriteError, Start, communication, count_ops
from meshwright.passes import OverlapSchedule, SplitProducts

from .steps import assert_same, llama_step

ALL = SplitProducts(2, least=0)


def reductions(program: Program) -> int:
    return sum("AllReduce" in repr(n.op) for n in communication(program))


@pytest.mark.parametrize(("shape", "pieces"), [((1, 1, 2), 2), ((1, 2, 2), 4), ((1, 1, 2), 8)])
def test_pieces_have_the_numbers_of_the_whole(shape: tuple[int, int, int], pieces: int) -> None:
    step = llama_step(shape)
    programs = step.changed(lambda p: SplitProducts(pieces, least=0)(p, deep=True))
    assert_same(step, programs, exactly=False)


def test_each_piece_has_a_reduction_of_its_own() -> None:
    step = llama_step((1, 1, 2))
    before, after = step.programs[0], step.changed(ALL)[0]
    split = len([c for c in after.changes if c.by == "split_products" and "AllReduce" in c.what])
    assert split >= 4  # two per block in the forward pass
    assert reductions(after) == reductions(before) + split
    made = [count_ops(p.nodes)["aten.mm.default"] for p in (before, after)]
    assert made[1] >= made[0] + split  # a sum of two products is two more


def test_a_piece_is_in_flight_while_the_next_is_computed() -> None:
    step = llama_step((1, 1, 2))
    programs = step.changed(lambda p: OverlapSchedule(cluster_of("H100"))(ALL(p)))
    assert_same(step, programs, exactly=False)
    nodes = programs[0].nodes
    begun = [at for at, n in enumerate(nodes) if isinstance(n.op, Start)]
    assert any(str(nodes[at + 1].op) == "aten.mm.default" for at in begun)


class _Blocks(nn.Module):
    """Blocks with norms, biases, and operators that are not by rows."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(8, 16) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(16, 8) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(8) if norm == "layer" else nn.RMSNorm(8) for _ in range(3))
        self.shift = nn.Parameter(torch.linspace(-1, 1, 8).reshape(1, 1, 8))

    def forward(self, x_btd: Tensor) -> Tensor:
        for up, down, norm in zip(self.up, self.down, self.norms, strict=True):
            h_btd = norm(x_btd).to(torch.float64).to(torch.float32) * x_btd.sigmoid()
            x_btd = x_btd + down(F.gelu(up(h_btd))) - x_btd.mean(-1, keepdim=True)
        return x_btd.softmax(-1) + self.shift * x_btd.mean(1, keepdim=True)


def _trained(norm: str, passes: tuple[Any, ...] = ()) -> tuple[list[Tensor], Program | None]:
    """Return losses and parameters of two steps: of plain PyTorch, or with passes on the caller's rank of two."""
    torch.manual_seed(0)
    model: Any = _Blocks(norm)
    x, y = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    if passes:
        styles = {"up.*": mw.ColwiseParallel(), "down.*": mw.RowwiseParallel()}
        mw.parallelize(model, None, mw.ProcessMesh([0, 1], ["tp"]), mw.Parallelism(styles))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mw.to_static(model, None, F.mse_loss, optimizer, mw.Strategy.of(passes=passes)) if passes else None

    def plain_step() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    losses = [(step(x, y) if step else plain_step()).detach() for _ in range(2)]
    numbers = [mw.unshard_dtensor(v) if passes else v for v in (*losses, *model.parameters())]
    return [v.detach().clone() for v in numbers], step.program if step else None


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("pieces", [2, 3])
def test_operators_after_a_sum_go_on_by_pieces(norm: str, pieces: int) -> None:
    passes = (SplitProducts(pieces, least=0), OverlapSchedule(cluster_of("H100")))
    expected, _ = _trained(norm)
    for found, program in mw.simulate(lambda: _trained(norm, passes), 2):
        torch.testing.assert_close(found, expected)
        assert program is not None
        assert any("operators after these sums" in change.what for change in program.changes)
        assert count_ops(program.nodes)["aten.gelu.default"] == 2 * pieces + 1  # no sum is before the first one


def test_small_products_and_uneven_rows_stay_whole() -> None:
    program = llama_step((1, 1, 2)).programs[0]
    assert SplitProducts(2)(program) is program
    assert SplitProducts(7, least=0)(program) is program


def test_one_piece_is_refused() -> None:
    with pytest.raises(RewriteError, match="one piece"):
        SplitProducts(1)
