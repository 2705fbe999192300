"""Programs of decode steps use the present weights, and follow changes of the model, or give way to the eager step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.weights import StaleWeightsError
from tests.generate.test_decode_step import NEW, PLAN, PROMPTS, llama, on_mesh, programs

IDS = torch.tensor([[1, 2, 3, 4], [3, 4, 5, 6]])


def marked(axis: str, is_meta: bool = False) -> Any:
    with torch.device("meta" if is_meta else "cpu"):
        model = llama()
    mw.parallelize(model, None, mw.ProcessMesh([0, 1], [axis]), mw.Parallelism(PLAN))
    return model


def check(sampler: mw.Sampler, trainer: Any) -> None:
    """Compare the tokens of a program with those of a new eager sampler of the trainer."""
    found = sampler.generate(PROMPTS, NEW, temperature=0)
    wanted = mw.sampler(trainer, static_after=None).generate(PROMPTS, NEW, temperature=0)
    torch.testing.assert_close(found.log_probs, wanted.log_probs, atol=1e-5, rtol=0)
    assert torch.equal(found.tokens, wanted.tokens)
    assert programs(sampler)[0] >= 1


def step(trainer: Any, optimizer: torch.optim.Optimizer) -> None:
    trainer(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_a_program_uses_the_weights_of_the_last_sync(axis: str) -> None:
    """All weights are shared on tp, and most are copied on dp."""

    def go() -> None:
        trainer, sampler = marked(axis), mw.sampler(marked("tp", is_meta=True), static_after=0)
        optimizer = torch.optim.SGD(trainer.parameters(), 0.5)
        mw.weights.sync(trainer, sampler)
        check(sampler, trainer)
        for act in (lambda: step(trainer, optimizer), lambda: assign(trainer)):
            act()
            if axis == "dp":
                with pytest.raises(StaleWeightsError):
                    sampler.generate(PROMPTS, NEW)
            mw.weights.sync(trainer, sampler)
            check(sampler, trainer)

    mw.simulate(go, 2)


def assign(model: Any) -> None:
    for part in (model.model.norm, model.model.layers[0].mlp.up_proj):
        part.weight.data = part.weight.data * 1.5


def test_a_program_of_the_trainer_itself_uses_the_present_weights() -> None:
    def call(model: Any) -> None:
        sampler, optimizer = mw.sampler(model, static_after=0), torch.optim.SGD(model.parameters(), 0.5)
        check(sampler, model)
        for act in (lambda: step(model, optimizer), lambda: assign(model)):
            act()
            check(sampler, model)

    on_mesh("tp", call)


@pytest.mark.parametrize("is_other", [False, True])
def test_a_program_uses_the_weights_after_the_model_slept(is_other: bool) -> None:
    """The model slept by the sampler itself, or by another sampler of the model."""

    def go() -> None:
        trainer, model = marked("dp"), marked("tp")
        sampler = mw.sampler(model, static_after=0)
        other = mw.sampler(model) if is_other else sampler
        mw.weights.sync(trainer, sampler)
        check(sampler, trainer)
        other.sleep()
        assign(trainer)
        other.wake()
        check(sampler, trainer)

    mw.simulate(go, 2)


def read_a_number(module: Any, args: Any, out: torch.Tensor) -> None:
    if out.sum().item() > 1e30:
        raise ValueError


@pytest.mark.filterwarnings("ignore::meshwright.generate.EagerStepWarning")
def test_a_change_that_cannot_be_recorded_leads_back_to_the_eager_step() -> None:
    def call(model: Any) -> None:
        sampler = mw.sampler(model, static_after=0)
        check(sampler, model)
        assert programs(sampler) == [1]
        model.model.layers[0].mlp.register_forward_hook(read_a_number)
        sampler.generate(PROMPTS, NEW)
        assert programs(sampler) == [0]

    on_mesh("tp", call)


def test_autocast_changes_the_cache_and_no_token() -> None:
    def call(model: Any) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [mw.sampler(model, static_after=n).generate(PROMPTS, NEW, seed=1).tokens for n in (0, None)]

    found, wanted = on_mesh("tp", call)
    assert torch.equal(found, wanted)
