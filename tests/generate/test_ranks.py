"""A sampler on some of the ranks: they generate by themselves, and the others get the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.comm import among_ranks, current_communicator, world_ranks
from meshwright.generate import _step_runs
from meshwright.weights import StaleWeightsError, WeightError
from tests.weights.models import PROMPTS, Decoder, marked, train

FIRST, SECOND = mw.ProcessMesh([0, 1], ["tp"]), mw.ProcessMesh([2, 3], ["tp"])


def calls_on_four(act: Any) -> tuple[Any, list[int]]:
    """Return the result of rank 0, and the number of collectives of each rank."""

    def go() -> Any:
        return act(), current_communicator().seen.total_calls

    found = mw.simulate(go, 4)
    return found[0][0], [calls for _, calls in found]


def test_the_other_ranks_get_the_tokens_and_make_few_calls() -> None:
    def go(mesh: mw.ProcessMesh | None, stop: int | None = None) -> Any:
        model = Decoder() if mesh is None else marked(mesh)
        return mw.sampler(model).generate(PROMPTS, 20, n=2, seed=1, stop=stop)

    for stop in (None, 3):
        wanted = go(None, stop)
        found, calls = calls_on_four(lambda stop=stop: go(SECOND, stop))
        assert torch.equal(found.tokens, wanted.tokens)
        assert torch.equal(found.lengths, wanted.lengths)
        torch.testing.assert_close(found.log_probs, wanted.log_probs)
        assert found.weight_version == 1
        assert calls[0] == calls[1] < 6 < 20 < calls[2] == calls[3]


def test_a_sampler_that_keeps_its_weights_asks_no_trainer() -> None:
    def go() -> Any:
        trainer, sampler = marked(FIRST), mw.sampler(marked(SECOND, meta=True))
        mw.weights.sync(trainer, sampler, when_stale="keep")
        first = sampler.generate(PROMPTS, 4, seed=1)
        for _ in range(3):
            train(trainer)
        second = sampler.generate(PROMPTS, 4, seed=1)
        assert torch.equal(first.log_probs, second.log_probs)
        assert (first.weight_version, second.weight_version) == (1, 1)
        assert mw.weights.sync(trainer, sampler, when_stale="keep").version == 2
        third = sampler.generate(PROMPTS, 4, seed=1)
        assert not torch.equal(first.log_probs, third.log_probs)
        train(trainer)
        mw.weights.sync(trainer, sampler)
        train(trainer)
        with pytest.raises(StaleWeightsError):
            sampler.generate(PROMPTS, 4)

    calls_on_four(go)


def test_weights_that_are_kept_share_no_memory() -> None:
    def go() -> None:
        trainer, model = marked(FIRST), marked(FIRST)
        sampler = mw.sampler(model)
        mw.weights.sync(trainer, sampler)
        found = mw.weights.sync(trainer, sampler, when_stale="keep")
        assert not found.shared
        first = sampler.generate(PROMPTS, 4, seed=1)
        train(trainer)
        assert torch.equal(sampler.generate(PROMPTS, 4, seed=1).log_probs, first.log_probs)
        with pytest.raises(WeightError, match="one set of weights"):
            mw.weights.sync(trainer, trainer, when_stale="keep")

    calls_on_four(go)


def test_an_error_on_the_ranks_of_the_model_is_raised_on_all_ranks() -> None:
    def go() -> None:
        model = marked(SECOND)
        with torch.no_grad():
            model.head.weight.fill_(float("nan"))
        with pytest.raises(mw.errors.GenerationError, match="NaN or infinity"):
            mw.sampler(model).generate(PROMPTS, 2)
        with pytest.raises(mw.errors.GenerationError, match="99"):
            mw.sampler(marked(SECOND)).generate(PROMPTS, 2, stop=99)
        with pytest.raises(mw.errors.DisagreementError, match="seed is 0 on rank 0 and 1 on rank 1"):
            mw.sampler(marked(SECOND)).generate(PROMPTS, 2, seed=int(mw.get_rank() == 1))

    calls_on_four(go)


def test_a_world_of_some_ranks_ends_with_its_block() -> None:
    def go() -> tuple[int, ...]:
        with among_ranks([3, 2]):
            found = world_ranks()
        assert world_ranks() == (0, 1, 2, 3)
        return found

    assert mw.simulate(go, 4)[0] == (2, 3)


@pytest.mark.parametrize(
    ("lacking", "wide", "agreed"), [([], [], True), ([1], [], False), ([], [1], False), ([], [0, 1], True)]
)
def test_ranks_use_fast_products_if_all_add_up_in_the_same_order(
    lacking: list[int], wide: list[int], agreed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choice() -> bool:
        return _step_runs.StepRuns(None)._all_have_fast_products()

    monkeypatch.setattr(_step_runs, "has_fast_products", lambda: mw.get_rank() not in lacking)
    monkeypatch.setattr(_step_runs, "has_wide_vectors", lambda: mw.get_rank() in wide)
    assert mw.simulate(choice, 2) == [agreed, agreed]
