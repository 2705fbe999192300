"""Calls of a repeated step are compared behind their transfer, and mistakes there are found as in a first step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
import _comparison_program as program

from meshwright.comm import CommCall, current_communicator, launch, simulate
from meshwright.comm.checking import call_forecast
from meshwright.comm.checking.call_forecast import CallForecast
from meshwright.comm.checking.comparison_order import ComparisonOrder, Order
from meshwright.comm.transport.control_links import ControlLinks

pytestmark = pytest.mark.usefixtures("forked_processes")

SCRIPT = str(Path(program.__file__))
OVER_GLOO = {"MESHWRIGHT_SHARED_MEMORY": "off"}
CALLS = st.lists(st.integers(0, 3), max_size=60)


def past(calls: list[int]) -> CallForecast:
    found = CallForecast()
    for call in calls:
        found.expects(call)
    return found


@given(CALLS, st.integers(1, 40), st.integers(0, 3), st.integers(0, 3))
def test_of_two_ranks_with_different_calls_one_compares_first(calls: list[int], times: int, a: int, b: int) -> None:
    assert a == b or not (past(calls * times).expects(a) and past(calls * times).expects(b))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_a_step_that_repeats_is_predicted(step: list[int]) -> None:
    """Also if it has runs of equal calls."""
    calls = past(step * 60)
    assert all(calls.expects(call) for call in step)


def test_a_past_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_forecast, "_MOST", 50)
    calls = past([1, 2, 3] * 200)
    assert len(calls._past) <= 50
    assert len(calls._behind) <= 50


class Links:
    """Links of rank 0 over a connection."""

    rank, has_wire = 0, True

    def needs_round_trip(self, peer: int) -> bool:
        return peer != 0


class LinksInMemory(Links):
    """Links of rank 0 through shared memory."""

    has_wire = False

    def open_to(self, group: tuple[int, ...]) -> object:
        return ()


def test_a_rank_whose_links_share_memory_keeps_no_past() -> None:
    order = ComparisonOrder(cast(ControlLinks, LinksInMemory()))
    call = CommCall("all_reduce", "sum", torch.float32, ((4,),), ((4,),), (0, 1))
    assert {order.of_call(call, 1) for _ in range(40)} == {Order.FIRST}
    assert not order._of_groups


def test_pieces_are_compared_first() -> None:
    """Ranks know the sizes of their own pieces only, so these cannot be predicted."""
    order = ComparisonOrder(cast(ControlLinks, Links()))
    call = CommCall("all_to_all", "", torch.float32, ((1,), (3,)), ((1,), (1,)), (0, 1))
    assert {order.of_call(call, 1) for _ in range(40)} == {Order.FIRST}


def test_a_call_that_only_other_ranks_can_predict_is_compared_first() -> None:
    """Its transfer is measured, because the others compare it behind."""
    order = ComparisonOrder(cast(ControlLinks, Links()))
    call, elsewhere = (CommCall("all_reduce", "sum", torch.float32, ((4,),), ((4,),), (0, peer)) for peer in (1, 2))
    for kind in range(40):
        found = order.of_call(call, 1)
        order.of_call(elsewhere, kind)
    assert found is Order.FIRST_HERE


def results_of(folder: Path, story: str) -> list[Any]:
    """Return the results of a story by rank."""
    assert launch([SCRIPT, str(folder), story, "gloo"], 2, OVER_GLOO, timeout=60) == 0
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in program.PAIR]


@pytest.fixture(scope="module")
def agreement(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of(tmp_path_factory.mktemp("agreement"), "agreement")


def test_a_rank_that_is_slow_before_its_transfers_is_named(tmp_path: Path) -> None:
    assert results_of(tmp_path, "slowness") == [[1], []]


def test_ranks_that_repeat_their_mistakes_compare_them_first(tmp_path: Path) -> None:
    """Their pasts differ, so both could predict their own calls."""
    for told in results_of(tmp_path, "repeated mistakes"):
        assert [error.partition(":")[0] for error in told] == ["DisagreementError"] * 4


def test_a_repeated_step_gives_the_results_of_simulated_ranks(agreement: list[dict[str, Any]]) -> None:
    for found, goal in zip(agreement, simulate(_simulated_step, 2), strict=True):
        assert found["results"] == found["after"] == goal


def _simulated_step() -> list[Any]:
    return program.step(current_communicator())


def test_flags_are_exchanged_in_frames(agreement: list[dict[str, Any]]) -> None:
    goal = simulate(lambda: program.flags(current_communicator()), 2)
    assert goal == [[False, True, True, True, False]] * 2
    assert [found["flags"] for found in agreement] == [found["flags after"] for found in agreement] == goal


def test_a_rank_without_a_flag_is_named(agreement: list[dict[str, Any]]) -> None:
    for found in agreement:
        assert found["other"].startswith("DisagreementError")
        assert "rank 0 calls any_true()" in found["other"]


def test_only_pieces_are_compared_before_their_transfer(agreement: list[dict[str, Any]]) -> None:
    assert [found["first"] for found in agreement] == [["all_to_all"]] * 2


def test_calls_for_other_values_raise_on_both_ranks(agreement: list[dict[str, Any]]) -> None:
    for found in agreement:
        assert found["other values"].startswith("DisagreementError")
        assert "are for different values" in found["other values"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("other_call", ("rank 0 calls all_reduce(sum", "rank 1 calls all_reduce(max")),
        ("other_order", ("rank 0 calls all_reduce(sum, float32, (4,))", "rank 1 calls all_reduce(sum, float32, (2,))")),
        ("ended", ("rank 0: MissingCallError", "rank 1 ended normally")),
        ("killed", ("rank 0: DeadPeerError", "rank 1 is dead")),
        ("lives_on", ("meshwright: rank 0 ends with an error", "rank 1 calls all_reduce(max")),
    ],
)
def test_a_fault_in_a_repeated_step_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], fault: str, words: tuple[str, ...]
) -> None:
    told = said_about(tmp_path, fault, "gloo", capfd)
    assert all(word in told for word in words), told


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("killed", ("rank 0: DeadPeerError", "rank 1 is dead")),
        ("lives_on", ("rank 0: DisagreementError", "rank 1 calls all_reduce(max")),
    ],
)
def test_a_fault_in_a_small_call_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], fault: str, words: tuple[str, ...]
) -> None:
    """Both ranks raise, because the data travels with the comparison."""
    told = said_about(tmp_path, fault, "frames", capfd)
    assert all(word in told for word in words), told


def said_about(folder: Path, fault: str, way: str, capfd: pytest.CaptureFixture[str]) -> str:
    """Return the output of two ranks, of which one makes a mistake or ends."""
    launch([SCRIPT, str(folder), fault, way], 2, OVER_GLOO, timeout=60, all_print=True)
    told = capfd.readouterr()
    return told.err + told.out
