"""Plans: batched prices equal single ones, follow from work and memory, and the best plan is found."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks._published_software import MEGATRON_2021
from meshwright.cost import Cluster, Device, Habits, Link, cluster_of
from meshwright.search import (
    Experts,
    Latent,
    Plan,
    SearchError,
    Software,
    Transformer,
    choose,
    columns,
    hold,
    parse_plan,
    predict,
    simulate_step,
    usable_memory,
)
from meshwright.search.transformer_plans.candidates import candidates
from meshwright.search.transformer_plans.layer_time import NARROW, PRECISIONS
from meshwright.search.transformer_plans.tensor_layouts import stage_parts

LLAMA = Transformer(32, 4096, 32, 8, 128, 14336, 128256)
SMALL = Transformer(8, 1024, 16, 8, 64, 2816, 32000)
SPARSE = Transformer(
    12, 2048, 16, 16, 128, 8192, 32000, experts=Experts(64, 6, 1408, 2816, 1), latent=Latent(1536, 512, 128, 64, 128)
)
MODELS = {"llama": LLAMA, "small": SMALL, "experts": SPARSE}


def plans(schedule: str, recompute: Any, seed: int, count: int = 20) -> list[Plan]:
    """Return random plans with this schedule and recomputation."""
    draw = random.Random(seed)

    def one() -> Plan:
        dp, tp, cp = draw.choice([1, 2, 4]), draw.choice([1, 2, 4]), draw.choice([1, 2])
        pp = draw.choice([2, 4]) if schedule != "1F1B" else draw.choice([1, 2, 4])
        return Plan(
            dp,
            tp,
            pp,
            cp,
            draw.choice([1, 2]),
            2 if schedule == "Interleaved 1F1B" else 1,
            draw.choice([0, 1, 2, 3]),
            tp > 1,
            schedule,
            draw.choice([1, 2]),
            32,
            2048,
            recompute,
        )

    return [one() for _ in range(count)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved 1F1B", "ZB-1p", "ZB-2p"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_batched_prices_equal_those_one_by_one(model: str, schedule: str, recompute: str) -> None:
    some = plans(schedule, recompute, seed=7 * len(schedule) + len(recompute))
    cluster = cluster_of("H100")
    together = predict(MODELS[model], columns(some), cluster)
    held = hold(MODELS[model], columns(some))
    alone = [predict(MODELS[model], plan, cluster).seconds for plan in some]
    np.testing.assert_allclose(np.asarray(together.seconds), np.asarray(alone, dtype=float).ravel(), rtol=1e-12)
    alone = [hold(MODELS[model], plan).nbytes for plan in some]
    np.testing.assert_allclose(np.asarray(held.nbytes), np.asarray(alone, dtype=float).ravel(), rtol=1e-12)


def ideal() -> Cluster:
    """Return a single device without losses."""
    rates = {torch.bfloat16: 1e12, torch.float32: 1e12}
    return Cluster(
        Device("ideal", rates, 1e18, 1e15, 0.0, reach=1.0, attention=(1.0, 1.0)), Link("none", 1e18, 0.0, 0.0)
    )


@pytest.mark.parametrize("model", ["llama", "small"])
def test_an_ideal_device_takes_the_time_of_the_matrix_products(model: str) -> None:
    m, habits = MODELS[model], Habits(writes=0.0, emptiness=0.0, launch=0.0, host=(0.0, 0.0), streamed=1.0)
    plan = Plan(batch=4, sequence=2048)
    products = 6 * (m.parameters - m.embedding_parameters) * plan.batch * plan.sequence
    scores = m.layers * 2 * plan.batch * plan.sequence**2 * m.heads * 2 * m.head_dim * 0.5
    found = predict(m, plan, ideal(), Software(accumulation=0.0), habits)
    assert float(np.asarray(found.seconds)) == pytest.approx((products + 3.5 * scores) / 1e12, rel=0.01)


@pytest.mark.parametrize("model", MODELS)
def test_larger_values_cost_more(model: str) -> None:
    m, cluster, base = MODELS[model], cluster_of("A100"), Plan(dp=4, tp=2, zero=1, batch=32)

    def seconds(**other: Any) -> float:
        return float(np.asarray(predict(m, replace(base, **other), cluster).seconds))

    def nbytes(software: Software | None = None, **other: Any) -> float:
        return float(np.asarray(hold(m, replace(base, **other), software or Software()).nbytes))

    assert seconds(batch=64) > seconds() > seconds(dp=8)
    assert seconds(recompute="full") > seconds(recompute="selective") > seconds()
    assert nbytes(microbatch=2) > nbytes() > nbytes(sequence_parallel=True)
    assert nbytes() > nbytes(recompute="selective") > nbytes(recompute="full")
    assert nbytes(zero=0) > nbytes(zero=1) > nbytes(zero=2) > nbytes(zero=3)
    assert nbytes(MEGATRON_2021) > nbytes(replace(MEGATRON_2021, fused_attention=True))


def test_parameters_are_those_of_the_published_models() -> None:
    gpt = Transformer(96, 12288, 96, 96, 128, 49152, 51200, gated=False, tied=True)
    deepseek = Transformer(
        61,
        7168,
        128,
        128,
        128,
        18432,
        129280,
        experts=Experts(256, 8, 2048, 2048, 3),
        latent=Latent(1536, 512, 128, 64, 128),
    )
    lite = Transformer(
        27, 2048, 16, 16, 128, 10944, 102400, experts=Experts(64, 6, 1408, 2816, 1), latent=Latent(0, 512, 128, 64, 128)
    )
    for model, billions in ((LLAMA, 8.03), (gpt, 174.6), (deepseek, 671), (lite, 15.7)):
        assert model.parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_uneven_experts_cost_as_much_as_the_fullest_rank() -> None:
    assert SPARSE.experts is not None
    uneven = replace(SPARSE, experts=replace(SPARSE.experts, imbalance=1.5))
    plan, cluster = Plan(dp=8, ep=8, zero=1, batch=32, sequence=4096), cluster_of("H100")
    for ep, more in ((1, False), (8, True)):
        given = replace(plan, ep=ep)
        alike, found = (float(predict(m, given, cluster).seconds) for m in (SPARSE, uneven))
        there, here = (float(np.asarray(hold(m, given).nbytes)) for m in (SPARSE, uneven))
        assert (found > alike, here > there) == (more, more)
    most = replace(SPARSE, experts=replace(SPARSE.experts, imbalance=1e9))
    with pytest.raises(SearchError, match="imbalance"):
        replace(SPARSE.experts, imbalance=0.5)
    assert float(predict(most, replace(plan, ep=2), cluster).seconds) < 3 * float(
        predict(SPARSE, replace(plan, ep=2), cluster).seconds
    )


def test_the_best_plan_is_the_best_of_two_hundred() -> None:
    found = choose(SMALL, cluster_of("A100-40GB"), 16, 64, 2048)
    assert found.considered >= found.fitting > 100
    assert found.best.seconds == min(p.seconds for p in (found.best, *found.next))
    every = choose(SMALL, cluster_of("A100-40GB"), 16, 64, 2048, keep=200)
    for priced in (every.best, *every.next[::4]):
        plan = priced.plan
        assert plan.ranks == 16
        assert plan.batch % (plan.dp * plan.microbatch) == 0
        assert priced.seconds in (
            pytest.approx(float(np.asarray(predict(SMALL, plan, cluster_of("A100-40GB")).seconds))),
            pytest.approx(simulate_step(SMALL, plan, cluster_of("A100-40GB"))),
        )
        assert float(np.asarray(hold(SMALL, plan).nbytes)) == pytest.approx(priced.nbytes)
        assert priced.nbytes <= usable_memory(cluster_of("A100-40GB"))
        assert priced.seconds >= 0.94 * found.best.seconds


def test_given_settings_are_kept() -> None:
    found = choose(LLAMA, cluster_of("H100"), 64, 256, 8192, tp=4, pp=2, recompute="full")
    assert (found.best.plan.tp, found.best.plan.pp, found.best.plan.recompute) == (4, 2, "full")


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: choose(LLAMA, cluster_of("V100"), 1, 8, 8192), "GB are missing"),
        (lambda: choose(LLAMA, cluster_of("H100"), 7, 8, 8192, tp=7), "no degrees"),
        (lambda: choose(LLAMA, cluster_of("H100"), 8, 8, 8192, tensor=2), "tensor"),
        (lambda: predict(LLAMA, Plan(schedule="V-Half"), cluster_of("H100")), "V-Half"),
        (lambda: choose(LLAMA, cluster_of("H100"), 8, 8, 8192, schedule="Chimera"), "Chimera"),
        (lambda: choose(LLAMA, cluster_of("A100"), 8, 8, 8192, "fp8"), "no faster products in fp8"),
        (lambda: choose(LLAMA, cluster_of("H100"), 8, 8, 8192, "int8"), "precision 'int8'"),
        (lambda: Plan(dp=0), "dp = 0"),
        (lambda: Plan(zero=4), "zero = 4"),
        (lambda: Plan(recompute="some"), "some"),
        (lambda: choose(LLAMA, cluster_of("H100"), 8, 8, 8192, recompute="some"), "some"),
        (lambda: Transformer(0, 1, 1, 1, 1, 1, 1), "at least 1"),
    ],
)
def test_impossible_plans_are_refused(act: Any, said: str) -> None:
    with pytest.raises(SearchError, match=said):
        act()


def test_every_precision_has_a_price_where_its_products_are_faster() -> None:
    for precision in PRECISIONS:
        for name in ("A100", "H100", "GB300"):
            dtype = NARROW.get(precision)
            try:
                seconds = float(np.asarray(predict(LLAMA, Plan(precision=precision), cluster_of(name)).seconds))
            except SearchError:
                assert dtype is not None
                assert dtype not in cluster_of(name).device.flops
                continue
            assert seconds <= float(np.asarray(predict(LLAMA, Plan(), cluster_of(name)).seconds)) * 1.01


@pytest.mark.parametrize(("device", "ranks", "batch"), [("H100", 1, 1), ("V100", 4, 64), ("A100-40GB", 2, 8)])
def test_too_few_ranks_are_refused_with_a_number_that_fits(device: str, ranks: int, batch: int) -> None:
    with pytest.raises(SearchError, match="GB are missing") as refused:
        choose(LLAMA, cluster_of(device), ranks, batch, 2048 if ranks == 1 else 8192)
    more = int(refused.value.write.split()[1].replace(",", ""))
    least: dict[str, Any] = {"recompute": "full", "microbatch": 1, "schedule": "1F1B"}
    assert choose(LLAMA, cluster_of(device), more, batch, 2048 if ranks == 1 else 8192, **least).fitting > 0
    assert more > ranks


@pytest.mark.parametrize("given", [{"dp": 3}, {"tp": 16}, {"zero": 2, "pp": 2}, {"schedule": "ZB-V", "chunks": 3}])
def test_fixed_choices_are_refused_with_some_that_have_a_plan(given: dict[str, Any]) -> None:
    with pytest.raises(SearchError, match="no degrees") as refused:
        choose(LLAMA, cluster_of("H100"), 8, 64, 4096, **given)
    name, _, value = refused.value.write.removeprefix("fix ").split()[:3]
    others = {key: fixed for key, fixed in given.items() if key != name}
    assert any(True for _ in candidates(LLAMA, 8, 64, 4096, "bf16", 8, {**others, name: int(value)}))


def test_a_plan_beyond_the_memory_needs_at_most_twice_as_much() -> None:
    found = choose(SMALL, replace_memory(cluster_of("A100-40GB"), 6e9), 4, 64, 2048)
    assert found.beyond is not None
    assert 1 < found.beyond.nbytes / (0.94 * 6e9) <= 2


def replace_memory(cluster: Cluster, nbytes: float) -> Cluster:
    return replace(cluster, device=replace(cluster.device, memory=nbytes))


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_reads_back_from_its_text(seed: int) -> None:
    for schedule in ("1F1B", "Interleaved 1F1B"):
        for plan in plans(schedule, "full", seed):
            assert parse_plan(plan.text()) == plan
            assert parse_plan(json.dumps(asdict(plan))) == plan


@pytest.mark.parametrize("text", ["dp = ", "{", "dp = 0", "dp = true", "tensor = 4", 'recompute = "some"', "dp = 2.5"])
def test_invalid_plan_text_is_refused(text: str) -> None:
    with pytest.raises(SearchError):
        parse_plan(text)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved 1F1B", "ZB-1p", "ZB-2p"])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 8), (4, 8), (4, 32), (8, 8), (8, 32)])
def test_the_closed_form_of_a_pipeline_is_near_its_table(schedule: str, pp: int, microbatches: int) -> None:
    chunks = 2 if schedule == "Interleaved 1F1B" else 1
    plan = Plan(dp=2, tp=2, pp=pp, chunks=chunks, zero=1, schedule=schedule, batch=2 * microbatches, sequence=4096)
    for name in ("H100", "A100"):
        told = float(np.asarray(predict(LLAMA, plan, cluster_of(name)).seconds))
        assert told == pytest.approx(simulate_step(LLAMA, plan, cluster_of(name)), rel=0.1)


MIXTRAL = Transformer(32, 4096, 32, 8, 128, 14336, 32000, experts=Experts(8, 2, 14336))


def test_states_of_experts_are_divided_over_their_copies_only() -> None:
    """The states of Mixtral 8x7B are 747 GB: more than eight devices of 80 GB have."""
    plan = Plan(dp=8, ep=4, zero=3, batch=64, sequence=4096, recompute="full")
    parts = hold(MIXTRAL, plan).parts
    states = float(parts["parameters and gradients"] + parts["optimizer"])
    assert 8 * states == pytest.approx(16 * MIXTRAL.parameters)
    assert float(parts["gathered"]) > 8 * MIXTRAL.expert_parameters / 4
    with pytest.raises(SearchError, match="GB are missing"):
        choose(MIXTRAL, cluster_of("H100"), 8, 64, 4096)


def test_zero_2_reduces_the_gradients_of_each_microbatch() -> None:
    slow = replace(cluster_of("H100"), outside=Link("slow", 1e9, 1e-5))

    def seconds(zero: int, microbatches: int) -> float:
        plan = Plan(dp=16, zero=zero, batch=16 * microbatches, sequence=2048)
        return float(predict(LLAMA, plan, slow).parts["gradients"])

    assert seconds(1, 8) == seconds(1, 1) == seconds(2, 1)
    assert seconds(2, 8) > 4 * seconds(2, 1)


@pytest.mark.parametrize(("layers", "pp", "chunks"), [(61, 16, 1), (126, 8, 5), (94, 8, 2), (61, 4, 10)])
def test_any_number_of_layers_is_planned_in_stages(layers: int, pp: int, chunks: int) -> None:
    model = replace(SMALL, layers=layers)
    found = choose(model, cluster_of("H100"), 2 * pp, 64, 1024, pp=pp, chunks=chunks, recompute="none")
    assert (found.best.plan.pp, found.best.plan.chunks) == (pp, chunks)
    assert sum(len(run) for stage in stage_parts(model, found.best.plan) for run in stage.layers) == layers


def test_a_tensor_parallel_group_may_be_larger_than_the_key_heads() -> None:
    few = replace(LLAMA, kv_heads=2)
    assert choose(few, cluster_of("H100"), 8, 8, 2048, tp=8).best.plan.tp == 8
    each, whole = (float(hold(few, Plan(tp=tp, batch=8)).parts["optimizer"]) for tp in (8, 1))
    repeated = 12 * few.layers * few.hidden * 2 * few.head_dim * (8 - 2)
    assert 8 * each == pytest.approx(whole + repeated)


@pytest.mark.parametrize(
    ("ranks", "batch", "said"), [(7919, 64, "use 7,872 or 7,936 ranks"), (100_000, 2048, "99,328 or 100,352 ranks")]
)
def test_a_refused_number_of_ranks_comes_with_the_nearest_that_work(ranks: int, batch: int, said: str) -> None:
    with pytest.raises(SearchError, match=said):
        choose(replace(LLAMA, layers=126), cluster_of("H100"), ranks, batch, 8192)


@pytest.mark.parametrize(
    ("model", "ranks", "given", "fix"),
    [
        (MIXTRAL, 8, {"ep": 3}, "fix ep = 2 or 4"),
        (LLAMA, 8, {"pp": 8, "chunks": 5, "schedule": "Interleaved 1F1B"}, "fix chunks = 4 or pp = 4"),
        (LLAMA, 8, {"schedule": "ZB-V", "recompute": "none", "dp": 8, "microbatch": 7}, "fix fewer choices"),
    ],
)
def test_sizes_without_a_plan_are_not_recommended(
    model: Transformer, ranks: int, given: dict[str, Any], fix: str
) -> None:
    """No number of ranks or sequences has a plan with these fields."""
    with pytest.raises(SearchError, match=f"fix:   {fix}$"):
        choose(model, cluster_of("H100"), ranks, 64, 4096, **given)


def test_recommended_sizes_have_a_plan_with_the_fixed_fields() -> None:
    with pytest.raises(SearchError, match="use 7,680 or 8,192 ranks"):
        choose(LLAMA, cluster_of("H100"), 7919, 64, 4096, schedule="ZB-V")
    choose(LLAMA, cluster_of("H100"), 7680, 64, 4096, schedule="ZB-V", keep=1)


def test_a_simpler_plan_is_named_if_it_is_nearly_as_fast() -> None:
    """Eight replicas with ZeRO are nearly as fast as two stages of six chunks; alone, they have no simpler plan."""
    found = choose(LLAMA, cluster_of("H100"), 8, 128, 8192)
    simpler = found.simpler
    assert found.best.plan.pp > 1
    assert simpler is not None
    assert (simpler.plan.dp, simpler.plan.pp, simpler.plan.chunks) == (8, 1, 1)
    assert found.best.seconds < simpler.seconds <= 1.03 * found.best.seconds
    assert choose(LLAMA, cluster_of("H100"), 8, 128, 8192, dp=8, zero=2, recompute="none").simpler is None
