"""Rounds: any conversion moves exactly the elements that a rank lacks, in messages within the cap."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from meshwright.checkpoint import current_world
from meshwright.comm import CommCall, simulate
from meshwright.layout import Layout, ProcessMesh, Spec, parse_spec
from meshwright.reshard import ReshardError, element_moves
from meshwright.reshard._regions import lacking
from meshwright.weights import WeightError
from meshwright.weights._rounds import Move, rounds_of
from meshwright.weights._sync import move_all
from tests.reshard.oracle import conversions, glue, take_apart, whole

LINE = ProcessMesh([0, 1, 2], ["x"])


def without_terms(spec: Spec) -> Spec:
    return spec.with_layout(Layout(spec.layout.dims))


def moved(src: Spec, dst: Spec, x: Tensor, cap: int) -> dict[int, Tensor]:
    """Return the parts after the moves, and check bytes and messages of each rank."""
    parts, moves = take_apart(src, x), element_moves(src, dst)
    size = dst.dtype.itemsize

    def go() -> Tensor:
        world = current_world()
        part = parts.get(world.rank, torch.empty(src.local_shape(world.rank), dtype=src.dtype))
        target = torch.empty(dst.local_shape(world.rank), dtype=dst.dtype)
        made = [Move("w", part, target, moves)]
        rounds = rounds_of(made, cap, "a test")
        assert world.communicator is not None
        with world.communicator.seen.record_calls() as calls:
            received, count = move_all(made, cap, world, "a test")
        assert count == len(rounds) == len(calls)
        assert all(bytes_of(call, world.rank, size) <= cap for call in calls)
        assert received == lacking(moves.dst, moves.src, world.rank) * size
        return target

    return dict(enumerate(simulate(go, max(moves.group) + 2)))


def bytes_of(call: CommCall, rank: int, size: int) -> int:
    """Return the bytes of all messages that the rank sends and receives."""
    return sum(shape[0] * size for side in call.messages for peer, shape, _ in side if peer != rank)


@settings(max_examples=100)
@given(st.booleans().flatmap(lambda across: conversions(across=across)), st.sampled_from([1, 2, 5, 10**6]))
def test_each_rank_receives_the_elements_that_it_lacks(pair: tuple[Spec, Spec], rows: int) -> None:
    src, dst = map(without_terms, pair)
    x = whole(tuple(src.shape), src.dtype)
    try:
        moves = element_moves(src, dst)
    except ReshardError:
        return
    least = max(moves.traffic(moves.most_pieces).values())
    torch.testing.assert_close(glue(dst, moved(src, dst, x, least * rows * dst.dtype.itemsize or 1)), x)


def test_a_cap_below_one_row_is_refused_with_the_least_cap() -> None:
    src, dst = (parse_spec(text, LINE) for text in ("f32[6@x, 4]", "f32[6, 4]"))
    with pytest.raises(WeightError, match="pass memory_cap=32 or more") as caught:
        rounds_of([Move("w", torch.empty(2, 4), torch.empty(6, 4), element_moves(src, dst))], 31, "a test")
    assert "w needs messages of 32 bytes" in str(caught.value)


def test_tensors_of_one_dtype_share_a_round_and_large_ones_need_several() -> None:
    specs = [parse_spec(text, LINE) for text in ("f32[6@x]", "bf16[6@x]", "f32[9@x]", "f32[3@x, 100]")]
    moves = [
        Move(
            str(s),
            torch.empty(1),
            torch.empty(1, dtype=s.dtype),
            element_moves(s, s.with_layout(Layout(((),) * s.ndim))),
        )
        for s in specs
    ]
    rounds = [[piece.move.name for piece in found.pieces] for found in rounds_of(moves, 1000, "a test")]
    assert rounds == [["bf16[6@x]"], ["f32[6@x]", "f32[9@x]", "f32[3@x, 100]"], ["f32[3@x, 100]"]]


def test_terms_and_parts_without_common_factors_are_refused() -> None:
    for text in ("f32[6] +x", "f32[3@x * 2]"):
        with pytest.raises(ReshardError, match=r"mw\.reshard first"):
            element_moves(parse_spec(text, LINE), parse_spec("f32[2 * 3@x]", LINE))
