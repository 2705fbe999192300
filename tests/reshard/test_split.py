"""A plan that is split at its collective gives the bits of the whole plan, and only its collective communicates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from meshwright.comm import current_communicator, simulate
from meshwright.layout import ProcessMesh, Spec, parse_spec
from meshwright.reshard import ConversionPlan, ReshardError, execute, plan, prepare

from .oracle import conversions, take_apart, whole

LINE = ProcessMesh([0, 1, 2], ["x"])
SQUARE = ProcessMesh([[0, 1], [2, 3]], ["x", "y"])


def _in_parts(made: ConversionPlan, local: Tensor) -> Tensor:
    """Return the result of a conversion whose collective is a call of its own."""
    here = current_communicator()
    before = here.seen.total_calls
    ready = prepare(made, local, here)
    assert here.seen.total_calls == before
    if ready is None:
        out = execute(made, local, here)
        assert here.seen.total_calls == before
        return out
    ready.call()
    after = here.seen.total_calls
    out = ready.finish()
    assert here.seen.total_calls == after
    return out


def _check(made: ConversionPlan) -> None:
    parts = take_apart(made.src, whole(tuple(made.src.shape), made.src.dtype))

    def program() -> tuple[Tensor, Tensor]:
        here = current_communicator()
        local = parts.get(here.rank)
        if local is None:
            local = torch.empty(made.src.local_shape(here.rank), dtype=made.src.dtype)
        with torch.no_grad():
            return execute(made, local, here), _in_parts(made, local)

    for rank, (at_once, in_parts) in enumerate(simulate(program, max(made.ranks) + 2)):
        assert torch.equal(at_once, in_parts) or rank not in made.dst.mesh
        assert at_once.shape == in_parts.shape
        assert in_parts.is_contiguous()


@settings(max_examples=60)
@given(conversions())
def test_a_split_plan_gives_the_same_bits(pair: tuple[Spec, Spec]) -> None:
    _check(plan(*pair))


@settings(max_examples=40)
@given(conversions(across=True))
def test_a_split_plan_to_another_mesh_gives_the_same_bits(pair: tuple[Spec, Spec]) -> None:
    _check(plan(*pair))


KINDS = {
    "all_reduce": ("[5, 4] +x", "[5, 4]"),
    "all_gather": ("[5, 4@x]", "[5, 4]"),
    "reduce_scatter": ("[5, 4] +x", "[5, 4@x]"),
    "all_to_all": ("[5@x, 4]", "[5, 4@x]"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_collective_is_known_by_its_kind(kind: str) -> None:
    src, dst = (parse_spec("f64" + text, LINE) for text in KINDS[kind])
    made = plan(src, dst)
    split = made.split_of_rank(0)
    assert split is not None
    assert split.transfer.kind == kind
    _check(made)


def test_several_collectives_become_one() -> None:
    made = plan(parse_spec("f64[5@x, 4] +y", SQUARE), parse_spec("f64[5, 4]", SQUARE))
    assert made.rounds == 2
    split = made.split_of_rank(0)
    assert split is not None
    assert (split.before, split.transfer.kind, split.after) == ((), "conversion", ())
    _check(made)


def test_a_local_plan_has_no_collective() -> None:
    made = plan(parse_spec("f64[5, 4]", LINE), parse_spec("f64[5@x, 4]", LINE))
    assert made.split_of_rank(0) is None
    _check(made)


def test_a_wrong_part_is_refused() -> None:
    made = plan(parse_spec("f64[5, 4] +x", LINE), parse_spec("f64[5, 4]", LINE))
    with pytest.raises(ReshardError, match="a part of shape"):
        simulate(lambda: prepare(made, torch.zeros(3, 4), current_communicator()), 3)
