"""Checks before updates: all ranks agree, and the error names the tensor."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.comm import Communicator, Group
from meshwright.engine.checks.comparison_steps import MOST_STEPS, SHARE, WARM_STEPS, Rhythm
from meshwright.engine.checks.finite_gradients import first_bad
from meshwright.engine.checks.known_answers import diagnosis
from meshwright.engine.checks.named_tensors import NamedTensor
from meshwright.engine.checks.replicas import replicas_of, sums
from meshwright.errors import StrategyError
from meshwright.layout import Spec, layout_of

ERRORS = {
    "bad gradient, whole": ("NonFiniteGradientError", "the gradient of 0.weight", "on rank 1"),
    "bad gradient, cut": ("NonFiniteGradientError", "the gradient of 0.weight", "on rank 1"),
    "bad numbers, static": ("NonFiniteGradientError", "the gradient of 0.weight", "non-finite numbers on rank 0, 1"),
    "flipped": ("ReplicaError", "step 1 of AdamW", "0.weight differs on rank 0, 1", "transient"),
    "flipped, static": ("ReplicaError", "step 1 of a static model", "0.weight differs on rank 0, 1"),
    "other start": ("ReplicaError", "step 0 of AdamW", "0.weight differs on rank 0, 1"),
    "other whole": ("ReplicaError", "step 0 of AdamW", "0.weight with checksum", "on rank 1", "dtensor_from_local"),
    "other whole, static": ("ReplicaError", "step 0 of a static model", "0.weight with checksum"),
    "frozen": ("DisagreementError", "the check of a step"),
    "not zeroed, whole": ("DisagreementError", "the check of a step", "left from the step before in group 0"),
    "not zeroed, cut": ("DisagreementError", "is 0 on rank 0 and 4 on rank 1"),
    "replayed": ("ReplicaError", "rank 1 gives other numbers", "transient"),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool)


@pytest.mark.parametrize("case", ERRORS)
def test_a_fault_is_reported_on_both_ranks(two: list[dict[str, str]], case: str) -> None:
    for found in two:
        assert found[case].startswith(ERRORS[case][0])
        assert all(word in found[case] for word in ERRORS[case]), found[case]


def test_a_write_on_one_rank_is_an_error_before_the_next_update(two: list[dict[str, str]]) -> None:
    for found in two:
        written = {case: told for case, told in found.items() if case.startswith("written by")}
        assert len(written) == 16
        assert all(told.startswith("DisagreementError") for told in written.values()), written


@pytest.mark.parametrize("case", ["clean", "left out", "written over"])
def test_right_steps_give_no_error(two: list[dict[str, str]], case: str) -> None:
    assert [found[case] for found in two] == ["", ""]


def test_replicas_are_the_ranks_that_hold_the_same_elements() -> None:
    mesh = mw.ProcessMesh([[0, 1, 2], [3, 4, 5]], ["a", "b"])
    choices = [mw.Replicate(), mw.Shard(0), mw.Shard(1)]
    for placements in itertools.product(choices, repeat=2):
        spec = Spec(mesh, layout_of(placements, 2, mesh), (6, 6), torch.float32)
        for rank in range(6):
            same = [r for r in range(6) if spec.local_ranges(r) == spec.local_ranges(rank)]
            assert list(replicas_of(spec, rank)) == same, placements


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_changed_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    x = torch.arange(6).to(dtype).reshape(2, 3)
    before = sums([NamedTensor("x", x)])
    raw = x.view(torch.uint8) if dtype != torch.complex64 else torch.view_as_real(x).view(torch.uint8)
    for at in range(raw.numel()):
        for bit in range(8 if dtype != torch.bool else 1):
            raw.view(-1)[at] ^= 1 << bit
            assert sums([NamedTensor("x", x)]) != before
            raw.view(-1)[at] ^= 1 << bit
    assert sums([NamedTensor("x", x)]) == before


def _tensors(bad: int, value: float) -> dict[str, Tensor | None]:
    found: list[Tensor | None] = [
        torch.ones(3),
        None,
        torch.ones(0),
        torch.ones(2, 2),
        torch.ones(2, dtype=torch.int64),
    ]
    x = found[bad]
    if x is not None:
        x.view(-1)[-1] = value
    return {str(at): x for at, x in enumerate(found)}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bad", [0, 3])
def test_the_first_bad_tensor_is_found(bad: int, value: float) -> None:
    assert first_bad(_tensors(bad, value)) == str(bad)
    assert first_bad(_tensors(bad, 1.0)) is None


FRACTIONS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
BYTES = [torch.float8_e5m2, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FRACTIONS + BYTES, ids=str)
def test_non_finite_numbers_are_found_in_every_dtype(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    for shape in [(), (1,), (7,), (40, 33), (3, 5, 64)]:
        x = torch.full(shape, most, dtype=torch.float64).to(dtype)
        assert first_bad({"x": x, "y": x.clone()}) is None, "a sum that overflows is no bad number"
        infinite = [[float("inf")], [float("inf"), -float("inf")]] if dtype is not torch.float8_e4m3fn else []
        for bad in ([float("nan")], *infinite):
            y = x.clone() if len(bad) <= x.numel() else torch.full((2,), most, dtype=torch.float64).to(dtype)
            y.reshape(-1)[-len(bad) :] = torch.tensor(bad).to(dtype)
            assert first_bad({"x": x, "y": y}) == "y"


@pytest.mark.parametrize(("at", "bad"), [(None, None), (2, "a"), (40, "b"), (90, None)])
def test_views_of_a_bucket_are_read_together(at: int | None, bad: str | None) -> None:
    """A number beside the views, as that of a loss in the same bucket, is no bad gradient."""
    bucket = torch.ones(100)
    if at is not None:
        bucket[at] = float("nan")
    assert first_bad({"a": bucket[:30].view(5, 6), "b": bucket[30:90]}) == bad


def test_replicas_are_compared_first_and_then_at_the_chosen_interval() -> None:
    rhythm, due = Rhythm(), list[bool]()
    for _ in range(8):
        due.append(rhythm.is_due())
        rhythm.advance(3)
    assert [at for at, is_due in enumerate(due) if is_due] == [0, 3, 6]


def test_a_slow_comparison_is_made_rarely() -> None:
    rhythm = Rhythm(took=1e9)
    for _ in range(WARM_STEPS):
        assert rhythm.wish() == 0
        rhythm.advance(0)
    assert rhythm.wish() == MOST_STEPS
    rhythm.advance(MOST_STEPS)
    assert rhythm.next == WARM_STEPS + MOST_STEPS


def test_the_interval_of_comparisons_keeps_their_share_of_the_fastest_step() -> None:
    rhythm = Rhythm(step=WARM_STEPS, took=1.0, fastest=100.0 * SHARE, every=5, next=WARM_STEPS)
    assert rhythm.wish() == round(1.0 / (SHARE * 100.0 * SHARE))
    rhythm.advance(7)
    assert (rhythm.every, rhythm.next) == (7, WARM_STEPS + 7)


@pytest.mark.parametrize("wrong", [{"bad_numbers": "no"}, {"replicas": -1}, {"replay": -1}])
def test_an_unknown_check_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(StrategyError, match="no such check"):
        mw.check_steps(**wrong)  # pyright: ignore[reportArgumentType] - wrong on purpose


def test_a_rank_whose_sums_are_always_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    all_reduce = Communicator.all_reduce

    def wrong(self: Communicator, x: Tensor, op: str, group: Group) -> Tensor:
        return all_reduce(self, x, op, group) + self.rank

    monkeypatch.setattr(Communicator, "all_reduce", wrong)
    told = mw.simulate(lambda: diagnosis((0, 1)), 2)
    assert told == ["known sums between ranks are wrong on rank 1: the fault persists"] * 2
