"""Training inside `same_numbers`: the same bits eagerly and as programs, in stages, and with checkpointed calls."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import meshwright as mw
from meshwright.fixed_order import MicrobatchTree, one_of_microbatches
from meshwright.fixed_order.kernels import tree

from ._training import STEPS, TENSOR, Way, batch, different, made, trained, update

ONE: Mapping[str, Any] = {}
ZERO = {"sharding": {"enable": True, "stage": 3, "least": 1, "axes": ["dp"]}}
LAYOUTS: dict[str, Way] = {
    "one device, static": Way(static=ONE),
    "dp 2 × tp 2, static": Way({"dp": 2, "tp": 2}, TENSOR, static=ONE, clips=False),
    "ZeRO-3": Way({"dp": 2}, zero=3),
    "ZeRO-3, static": Way({"dp": 2}, static=ZERO, clips=False),
    "pp 2": Way({"pp": 2}),
    "pp 2 × tp 2": Way({"pp": 2, "tp": 2}, TENSOR),
}
"""Ways to train with dropout."""


def piped(microbatches: int, schedule: str) -> dict[str, Any]:
    return {"pipeline": {"enable": True, "accumulate_steps": microbatches, "schedule_mode": schedule}}


PIPELINES: dict[str, Way] = {
    "8 microbatches": Way({"pp": 2}, microbatches=8),
    "tp 2, 4 microbatches": Way({"pp": 2, "tp": 2}, TENSOR, microbatches=4),
    "dp 2, 4 microbatches": Way({"pp": 2, "dp": 2}, microbatches=4),
    "4 microbatches, static": Way({"pp": 2}, static=piped(4, "ZB-H1"), clips=False),
}


@cache
def one_device(drop: float = 0.1, clips: bool = True) -> dict[str, Tensor]:
    return trained(Way(drop=drop, clips=clips))


@pytest.mark.parametrize("name", LAYOUTS)
def test_programs_and_stages_have_the_bits_of_one_device(name: str) -> None:
    way = LAYOUTS[name]
    assert not different(way, one_device(clips=way.clips))


@pytest.mark.parametrize("name", PIPELINES)
def test_microbatches_have_the_bits_of_the_whole_batch(name: str) -> None:
    way = replace(PIPELINES[name], drop=0.0)
    assert not different(way, one_device(0.0, way.clips))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", [Way(), Way({"dp": 2, "tp": 2}, TENSOR)], ids=["one device", "dp 2 × tp 2"])
def test_checkpointed_calls_run_again_inside_the_block(way: Way, reentrant: bool) -> None:
    assert not different(replace(way, reentrant=reentrant), one_device())


def test_a_change_of_mesh_in_the_middle_changes_no_bit(tmp_path: Path) -> None:
    first, then = Way({"dp": 2, "tp": 2}, TENSOR), Way({"dp": 4}, zero=3)

    def begin() -> None:
        model, optimizer = made(first)
        for step in range(STEPS - 1):
            torch.manual_seed(step)
            with mw.same_numbers():
                update(first, model, optimizer, model(*batch(step)))
        mw.save_checkpoint(tmp_path / "run", 1, model, optimizer)

    mw.simulate(begin, first.ranks)

    def resume() -> dict[str, Tensor]:
        return trained(then, range(STEPS - 1, STEPS), lambda *held: mw.load_checkpoint(tmp_path / "run", *held))

    wanted = one_device()
    for found in mw.simulate(resume, then.ranks):
        assert all(torch.equal(p, wanted[name]) for name, p in found.items())


def linear_step(**options: Any) -> mw.DistModel:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return mw.to_static(model, None, torch.nn.functional.mse_loss, optimizer, mw.Strategy.of(**options))


def test_a_step_is_recorded_anew_inside_and_outside() -> None:
    def counts() -> list[int]:
        step, x, found = linear_step(), torch.ones(2, 4), list[int]()
        for inside in (False, True, True, False):
            with mw.same_numbers() if inside else nullcontext():
                step(x, x)
            found.append(step.recordings)
        return found

    assert mw.simulate(counts, 1) == [[1, 2, 2, 2]]


@given(st.permutations(range(8)), st.integers(1, 8))
def test_terms_of_microbatches_are_one_tree_in_any_order(order: list[int], count: int) -> None:
    terms = torch.randn(count, 5)
    found = MicrobatchTree(count)
    for m in order:
        if m < count:
            found.add(m, terms[m])
    total = found.total()
    assert total is not None
    assert torch.equal(total, tree(lambda m: terms[m], 0, count))


OPTIONS: dict[str, dict[str, Any]] = {
    "inductor": {"compiler": "inductor"},
    "fused_passes": {"fused_passes": {"enable": True}},
    "gradient_merge": {"gradient_merge": {"enable": True, "k_steps": 2}},
    "full_graph": {"full_graph": False},
}


def test_two_copies_of_a_model_are_refused() -> None:
    way = Way({"pp": 2}, static=piped(4, "Chimera"), drop=0.0, clips=False)
    with pytest.raises(mw.errors.SameNumbersError, match="copies"):
        mw.simulate(lambda: trained(way), 2)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_change_sums_are_refused(name: str) -> None:
    def go() -> None:
        step = linear_step(**OPTIONS[name])
        with mw.same_numbers():
            step(torch.ones(2, 4), torch.ones(2, 4))

    with pytest.raises(mw.errors.SameNumbersError, match=name):
        mw.simulate(go, 1)


@pytest.mark.parametrize("rows", [(2, 2, 2), (2, 3)], ids=["three", "of two sizes"])
def test_microbatches_that_hold_no_whole_pieces_are_refused(rows: tuple[int, ...]) -> None:
    batches = [torch.ones(n, 4) for n in rows]
    with pytest.raises(mw.errors.SameNumbersError, match="1, 2, 4 or 8"), one_of_microbatches(batches):
        pass
