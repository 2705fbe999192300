"""Products in pieces: the same numbers, a collective per piece, and one piece in flight while the next is computed."""

from __future__ import annotations

import pytest

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
    split = len([c for c in after.changes if c.by == "split_products"])
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


def test_small_products_and_uneven_rows_stay_whole() -> None:
    program = llama_step((1, 1, 2)).programs[0]
    assert SplitProducts(2)(program) is program
    assert SplitProducts(7, least=0)(program) is program


def test_one_piece_is_refused() -> None:
    with pytest.raises(RewriteError, match="one piece"):
        SplitProducts(1)
