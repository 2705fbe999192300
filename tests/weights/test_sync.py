"""`sync`: the sampler has the trainer's values in its own layouts, and tokens of older weights are refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.comm import launch
from meshwright.weights import StaleWeightsError, Synced, WeightError

from .models import BATCH, LINE, PROMPTS, SQUARE, Decoder, equal, loss_of, marked, train

pytestmark = pytest.mark.usefixtures("forked_processes")

LAYOUTS: dict[str, Callable[[], nn.Module]] = {
    "plain": Decoder,
    "dp x tp": lambda: marked(SQUARE),
    "tp": lambda: marked(LINE),
    "dp": lambda: marked(mw.ProcessMesh(range(4), ["dp"])),
    "first half": lambda: marked(mw.ProcessMesh([0, 1], ["tp"])),
    "second half": lambda: marked(mw.ProcessMesh([2, 3], ["tp"])),
    "on the meta device": lambda: marked(LINE, meta=True),
}


def on_four(act: Callable[[], Any]) -> Any:
    return mw.simulate(act, 4)[0]


def local(x: Any) -> Tensor:
    return x.to_local()


def names_of(found: Synced) -> tuple[set[str], set[str]]:
    return set(found.shared), set(found.copied)


@pytest.mark.parametrize("sampled", LAYOUTS)
@pytest.mark.parametrize("trained", [name for name in LAYOUTS if "meta" not in name])
def test_the_sampler_gets_the_values_of_each_step(trained: str, sampled: str) -> None:
    def go() -> None:
        trainer, model = LAYOUTS[trained](), LAYOUTS[sampled]()
        sampler = mw.sampler(model)
        for version in (1, 2):
            with torch.no_grad():
                for p in trainer.parameters():
                    p.mul_(1.5)
            found = mw.weights.sync(trainer, sampler)
            assert found.version == version
            assert equal(trainer, model)
        assert sampler.generate(PROMPTS, 2).weight_version == 2

    on_four(go)


def test_equal_parts_share_memory_and_others_are_copied() -> None:
    def go() -> None:
        trainer, model = marked(SQUARE), marked(LINE, meta=True)
        shared, copied = names_of(mw.weights.sync(trainer, model))
        assert shared == {"words.weight", "head.bias", "scale"}
        assert copied == {"up.weight", "up.bias", "head.weight"}
        assert local(model.words.weight).data_ptr() == local(trainer.words.weight).data_ptr()
        assert isinstance(model.words.weight, nn.Parameter)
        assert not model.words.weight.requires_grad
        assert not mw.weights.sync(trainer, LAYOUTS["second half"]()).shared  # other ranks
        other = marked(SQUARE)
        found = mw.weights.sync(trainer, other)
        assert not found.copied
        train(trainer)
        sampler = mw.sampler(other)
        assert sampler.generate(PROMPTS, 2).weight_version == 2
        assert equal(trainer, other)

    on_four(go)


def test_a_trained_step_makes_the_weights_stale_in_the_eager_and_in_the_static_mode() -> None:
    def go() -> None:
        for is_static in (False, True):
            trainer = marked(SQUARE)
            optimizer = torch.optim.AdamW(trainer.parameters(), 0.1)
            static = mw.to_static(trainer, None, loss_of, optimizer)
            sampler, auto = mw.sampler(marked(LINE)), mw.sampler(marked(LINE))
            mw.weights.sync(static if is_static else trainer, sampler)
            mw.weights.sync(trainer, auto, when_stale="sync")
            first = sampler.generate(PROMPTS, 4, seed=1)
            if is_static:
                static(BATCH, BATCH)
            else:
                train(trainer, optimizer)
            with pytest.raises(StaleWeightsError, match=r"version 1, and the trainer has version 2: up\.weight"):
                sampler.generate(PROMPTS, 4, seed=1)
            wanted = mw.sampler(trainer).generate(PROMPTS, 4, seed=1)
            found = auto.generate(PROMPTS, 4, seed=1)
            assert (first.weight_version, found.weight_version, wanted.weight_version) == (1, 2, 2)
            torch.testing.assert_close(found.log_probs, wanted.log_probs)
            assert equal(trainer, auto.model)

    on_four(go)


def test_only_what_trains_is_copied_again() -> None:
    def go() -> tuple[Synced, Synced]:
        trainer, model = marked(SQUARE), marked(LINE)
        trainer.requires_grad_(False)
        trainer.up.weight.requires_grad_(True)
        first = mw.weights.sync(trainer, model)
        assert not mw.weights.sync(trainer, model).copied
        train(trainer)
        second = mw.weights.sync(trainer, model)
        assert equal(trainer, model)
        return first, second

    first, second = on_four(go)
    assert first.copied == ("up.weight", "up.bias", "head.weight")
    assert second.copied == ("up.weight",)


def test_a_stage_of_zero_moves_the_memory_and_so_the_sharing_ends() -> None:
    """Stage 1 gives parameters other memory in each step; stage 3 gives them another layout."""

    def go() -> None:
        mesh = mw.ProcessMesh(range(4), ["dp"])
        for stage in (lambda model: mw.ShardingStage1("dp", 1), lambda model: mw.ShardingStage3("dp", model, 1)):
            trainer, model = marked(mesh), marked(mesh)
            sampler = mw.sampler(model)
            assert not mw.weights.sync(trainer, sampler).copied
            optimizer = mw.shard_optimizer(torch.optim.SGD(trainer.parameters(), 0.5), stage(trainer))
            train(trainer, optimizer)
            with pytest.raises(StaleWeightsError):
                sampler.generate(PROMPTS, 2)
            mw.weights.sync(trainer, sampler)
            assert equal(trainer, model)
            before = [local(p).clone() for p in model.parameters()]
            train(trainer, optimizer)
            mw.weights.sync(trainer, sampler)
            assert equal(trainer, model)
            assert not all(torch.equal(local(p), x) for p, x in zip(model.parameters(), before, strict=True))

    on_four(go)


def test_memory_that_is_assigned_to_a_parameter_is_noticed_at_the_same_address_too() -> None:
    model, trainer = Decoder().bfloat16(), Decoder()
    sampler = mw.sampler(model)
    mw.weights.sync(trainer, sampler)
    for value in range(4):
        trainer.up.weight.data = torch.full((30, 16), float(value))  # the allocator uses the freed memory again
        with pytest.raises(StaleWeightsError, match=r"up\.weight has changed\n"):
            sampler.generate(PROMPTS, 1)
        mw.weights.sync(trainer, sampler)
        assert model.up.weight[0, 0] == value


def _double(trainer: Any, model: Any) -> None:
    model.double()


def _assign_to_sampler(trainer: Any, model: Any) -> None:
    model.up.weight.data = model.up.weight.data.clone()


def _wrap_layer(trainer: Any, model: Any) -> None:
    trainer.up = nn.Sequential(trainer.up)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (_double, r"words\.weight was replaced in the sampler, and 4 more"),
        (_assign_to_sampler, r"up\.weight was replaced in the sampler\n"),
        (_wrap_layer, r"up\.0\.bias has changed, and 3 more"),
    ],
)
def test_a_sampler_that_no_longer_shares_the_memory_is_stale(act: Callable[[Any, Any], None], message: str) -> None:
    trainer, model = Decoder(), Decoder()
    sampler = mw.sampler(model)
    assert not mw.weights.sync(trainer, sampler).copied
    act(trainer, model)
    train(trainer)
    with pytest.raises(StaleWeightsError, match=message):
        sampler.generate(PROMPTS, 1)


def test_a_write_through_data_counts_after_increment_version() -> None:
    trainer, model = Decoder(), Decoder().double()
    sampler = mw.sampler(model)
    mw.weights.sync(trainer, sampler)
    trainer.up.weight.data.mul_(2)
    torch.autograd.graph.increment_version(trainer.up.weight)
    with pytest.raises(StaleWeightsError, match=r"up\.weight"):
        sampler.generate(PROMPTS, 1)
    mw.weights.sync(trainer, sampler)
    assert torch.equal(model.up.weight, trainer.up.weight.double())


def test_weights_are_rounded_and_a_written_copy_is_repaired() -> None:
    def go() -> None:
        trainer, model = marked(SQUARE), marked(LINE).bfloat16()
        assert not mw.weights.sync(trainer, model).shared
        assert torch.equal(mw.unshard_dtensor(model.up.weight), mw.unshard_dtensor(trainer.up.weight).bfloat16())
        with torch.no_grad():
            model.up.bias.zero_()
        assert mw.weights.sync(trainer, model).copied == ("up.bias",)
        mw.weights.sync(model, trainer)
        assert torch.equal(mw.unshard_dtensor(model.up.weight).float(), mw.unshard_dtensor(trainer.up.weight))

    on_four(go)


def test_weights_of_another_trainer_are_not_written_to_the_memory_that_the_sampler_shares() -> None:
    def go() -> None:
        first, second, model = marked(LINE), marked(SQUARE), marked(LINE)
        train(second)
        mw.weights.sync(first, model)
        mw.weights.sync(second, model)
        assert equal(first, marked(LINE))
        assert equal(second, model)

    on_four(go)


def test_a_sleeping_sampler_that_syncs_itself_wakes_when_it_generates() -> None:
    def go() -> None:
        trainer, sampler = marked(SQUARE), mw.sampler(marked(LINE))
        mw.weights.sync(trainer, sampler, when_stale="sync")
        sampler.sleep()
        train(trainer)
        assert sampler.generate(PROMPTS, 2).weight_version == 2
        assert equal(trainer, sampler.model)

    on_four(go)


def test_sleep_frees_the_copies_and_wake_restores_them() -> None:
    def go() -> None:
        trainer, model = marked(SQUARE), marked(LINE)
        sampler = mw.sampler(model)
        mw.weights.sync(trainer, sampler)
        first = sampler.generate(PROMPTS, 4, seed=1)
        storage = weakref.ref(local(model.up.weight).untyped_storage())
        sampler.sleep()
        gc.collect()
        assert storage() is None
        assert local(trainer.words.weight).data_ptr() == local(model.words.weight).data_ptr()
        with pytest.raises(WeightError, match=r"call sampler\.wake"):
            sampler.generate(PROMPTS, 4, seed=1)
        sampler.wake()
        assert torch.equal(sampler.generate(PROMPTS, 4, seed=1).log_probs, first.log_probs)
        train(trainer)
        sampler.sleep()
        mw.weights.sync(trainer, sampler)  # wakes, too
        assert sampler.generate(PROMPTS, 4, seed=1).weight_version == 2

    on_four(go)


def test_a_sampler_of_the_trainer_itself_counts_its_versions() -> None:
    model = Decoder()
    sampler = mw.sampler(model)
    versions = [sampler.generate(PROMPTS, 1).weight_version for _ in range(2)]
    train(model)
    sampler.sleep()
    sampler.wake()
    assert [*versions, sampler.generate(PROMPTS, 1).weight_version] == [1, 1, 2]
    assert mw.weights.sync(model, sampler) == Synced(2, (*dict(model.named_parameters()), "scale"), (), 0, 0)


def test_tied_weights_stay_tied() -> None:
    def tied(mesh: mw.ProcessMesh) -> Any:
        model: Any = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
        model["a"].weight = mw.shard_tensor(model["a"].weight, mesh, [mw.Shard(mesh.ndim - 1)])
        model["b"].weight = model["a"].weight
        return model

    def go() -> None:
        trainer, model = tied(LINE), tied(SQUARE)
        assert mw.weights.sync(trainer, model).copied == ("a.weight", "b.weight")
        assert model["a"].weight is model["b"].weight
        trainer["b"].weight = mw.shard_tensor(nn.Parameter(torch.ones(4, 4)), LINE, [mw.Shard(0)])
        with pytest.raises(WeightError, match="tie the weights of both models, or of neither"):
            mw.weights.sync(trainer, model)

    on_four(go)


def test_a_tied_weight_that_the_trainer_unties_is_stale() -> None:
    def tied() -> Any:
        model: Any = Decoder()
        model.other = nn.Linear(16, 30)
        model.other.weight = model.up.weight
        return model

    trainer, model = tied(), tied().double()
    sampler = mw.sampler(model)
    mw.weights.sync(trainer, sampler)
    trainer.other.weight = nn.Parameter(torch.ones(30, 16))
    with pytest.raises(StaleWeightsError, match=r"other\.weight has changed"):
        sampler.generate(PROMPTS, 1)


def _wider() -> nn.Module:
    return Decoder(13)


def _renamed() -> nn.Module:
    model: Any = Decoder()
    model.upper = model.up
    del model.up
    return model


def _in_integers() -> nn.Module:
    model: Any = Decoder()
    model.scale = model.scale.int()
    return model


@pytest.mark.parametrize(
    ("sampler", "options", "message"),
    [
        (_wider, {}, r"words\.weight\n  found: shape \(12, 16\) in the trainer and \(13, 16\)"),
        (_renamed, {}, r"the sampler lacks up\.weight, up\.bias(.|\n)*upper\.(bias|weight) may be up\."),
        (_in_integers, {}, "but not quantized"),
        (Decoder, {"memory_cap": 0}, "positive whole number of bytes"),
        (Decoder, {"memory_cap": "1 GB"}, "a str"),
        (Decoder, {"when_stale": "never"}, 'when_stale="error", "sync" or'),
        (lambda: 3, {}, "pass the model"),
    ],
)
def test_models_that_do_not_match_are_refused(sampler: Any, options: Any, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        mw.weights.sync(Decoder(), sampler(), **options)


def test_a_refused_sync_changes_nothing() -> None:
    def go() -> None:
        trainer, model = marked(SQUARE), marked(LINE)
        before = mw.unshard_dtensor(model.up.weight).clone()
        with torch.no_grad():
            trainer.up.weight.mul_(2)
        with pytest.raises(WeightError, match=r"memory_cap=16(.|\n)*fix:   pass memory_cap=\d+ or more"):
            mw.weights.sync(trainer, model, memory_cap=16)
        assert torch.equal(mw.unshard_dtensor(model.up.weight), before)
        assert local(model.words.weight).data_ptr() != local(trainer.words.weight).data_ptr()
        assert mw.sampler(model).generate(PROMPTS, 1).weight_version == 1
        mw.weights.sync(trainer, model, memory_cap=400)
        assert equal(trainer, model)

    on_four(go)


def test_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    assert launch([str(Path(__file__).with_name("_program.py")), str(tmp_path)], 2, timeout=90) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
