"""Accounts of plans: parts add up to the whole, communication has its predicted cost, and rivals lose as stated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import meshwright as mw
from meshwright.cost import Cluster, cluster
from meshwright.graph import capture
from meshwright.models import Llama, LlamaConfig
from meshwright.search import (
    Experts,
    Plan,
    SearchError,
    Transformer,
    account,
    account_text,
    assumptions,
    changes,
    choose,
    hold,
    nearest_recipes,
    plan_mesh,
    predict,
    program_account,
    simulate_step,
    usable_memory,
)
from meshwright.search.transformer_accounts.known_recipes import KNOWN_RECIPES

LLAMA = Transformer(32, 4096, 32, 8, 128, 14336, 128256)
SPARSE = Transformer(12, 2048, 16, 16, 128, 8192, 32000, experts=Experts(64, 6, 1408, 2816, 1))
MACHINES = cluster("64xH100, 8 per node, 400G")
WORK: dict[str, Any] = {"batch": 64, "sequence": 8192}
PLANS = {
    "replicas": Plan(dp=64, zero=1, **WORK),
    "tensor parallel": Plan(dp=8, tp=8, sequence_parallel=True, **WORK),
    "ZeRO-3": Plan(dp=64, zero=3, **WORK),
    "context": Plan(dp=8, tp=2, cp=4, sequence_parallel=True, **WORK),
    "computed again": Plan(dp=8, tp=4, cp=2, recompute="full", **WORK),
    "1F1B": Plan(dp=8, tp=2, pp=4, sequence_parallel=True, **WORK),
    "interleaved": Plan(dp=8, tp=2, pp=4, chunks=2, schedule="Interleaved 1F1B", **WORK),
    "ZB-2p": Plan(dp=4, tp=2, pp=8, zero=1, schedule="ZB-2p", **WORK),
}


WITH_EXPERTS = {name: replace(plan, ep=4) for name, plan in PLANS.items() if plan.chunks == 1}
"""Without the plans of 8 chunks, because 12 layers do not divide into them."""


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        *(pytest.param(LLAMA, plan, id=f"llama, {name}") for name, plan in PLANS.items()),
        *(pytest.param(SPARSE, plan, id=f"experts, {name}") for name, plan in WITH_EXPERTS.items()),
    ],
)
def test_the_parts_add_up_to_the_step(model: Transformer, plan: Plan) -> None:
    told = account(model, plan, MACHINES)
    assert sum(told.spent.values()) == pytest.approx(simulate_step(model, plan, MACHINES))
    assert min(told.spent.values()) >= -1e-9
    assert (told.spent["bubble"] > 1e-9) == (plan.pp > 1)
    fullest = max(sum(parts.values()) for parts in told.held.values())
    assert fullest == pytest.approx(told.nbytes) == float(np.asarray(hold(model, plan).nbytes))
    assert len(told.held) == plan.pp


def slow_hosts_aside(machines: Cluster) -> Cluster:
    """Return the same links with devices so slow that the host never limits."""
    slower = {dtype: rate / 50 for dtype, rate in machines.device.flops.items()}
    return replace(machines, device=replace(machines.device, flops=slower))


@pytest.mark.parametrize("name", ["replicas", "tensor parallel", "context", "computed again"])
@pytest.mark.parametrize("model", [LLAMA, SPARSE], ids=["llama", "experts"])
def test_exposed_communication_is_the_time_that_links_add(name: str, model: Transformer) -> None:
    plan = PLANS[name] if model.experts is None else replace(PLANS[name], ep=4)
    told = account(model, plan, slow_hosts_aside(MACHINES))
    exposed = sum(row.exposed or 0.0 for row in told.sent)
    assert exposed == pytest.approx(told.spent["communication"], rel=2e-3)
    assert exposed > 0


def test_gathers_of_zero_3_are_hidden_by_long_computation() -> None:
    told = account(LLAMA, PLANS["ZeRO-3"], MACHINES)
    assert {row.kind for row in told.sent} == {"all-gather", "reduce-scatter"}
    assert 0 < told.spent["communication"] < 0.5 * sum(row.seconds for row in told.sent)


def test_every_parameter_is_listed_once() -> None:
    for model in (LLAMA, SPARSE, replace(LLAMA, tied=False, layers=30)):
        for plan in (Plan(batch=8), Plan(pp=4, batch=8), Plan(pp=2, chunks=3, schedule="Interleaved 1F1B", batch=8)):
            rows = [row for row in account_rows(model, plan) if row.layer != "one microbatch"]
            elements = sum(row.nbytes / 2 * row.count for row in rows)
            assert elements == pytest.approx(model.parameters)


def account_rows(model: Transformer, plan: Plan) -> Any:
    return account(model, plan, MACHINES).laid


def test_parts_shrink_by_the_axes_that_shard_them() -> None:
    whole = {row.name: row for row in account_rows(LLAMA, Plan(**WORK))}
    cut = {row.name: row for row in account_rows(LLAMA, Plan(dp=4, tp=2, zero=3, sequence_parallel=True, **WORK))}
    assert cut["gate"].layout == "bf16[14336@tp@dp, 4096]"
    assert cut["gate"].nbytes == whole["gate"].nbytes / 8
    assert cut["residual"].layout == "bf16[4@dp, 8192@tp, 4096]"


def test_rivals_are_listed_with_their_losses() -> None:
    found = choose(LLAMA, MACHINES, 64, 64, 8192, keep=3)
    steps: list[tuple[int, int]] = []
    told = account(LLAMA, found.best.plan, MACHINES, found, on_step=lambda done, of: steps.append((done, of)))
    assert [r.seconds for r in told.rivals] == pytest.approx([p.seconds for p in found.next])
    assert told.rivals[0].seconds >= told.seconds * (1 - 1e-9)
    assert all(r.why for r in told.rivals)
    slow = account(LLAMA, PLANS["tensor parallel"], MACHINES, found)
    assert "communication -" in slow.rivals[0].why
    assert steps == [(0, 2), (1, 2)]


def test_memory_is_the_bottleneck_if_the_fastest_plan_does_not_fit() -> None:
    tight = replace(MACHINES, device=replace(MACHINES.device, memory=24e9))
    found = choose(LLAMA, tight, 64, 64, 8192)
    assert found.beyond is not None
    assert found.beyond.seconds < found.best.seconds
    assert found.beyond.nbytes > 24e9 * 0.94
    assert account(LLAMA, found.best.plan, tight, found).why[0].startswith("memory:")
    slow = account(LLAMA, PLANS["tensor parallel"], MACHINES, choose(LLAMA, MACHINES, 64, 64, 8192))
    assert slow.why[0].startswith("another plan takes 0.")
    assert slow.why[1].startswith("communication:")
    alone = account(LLAMA, Plan(batch=64, sequence=8192), MACHINES)
    assert not alone.fits
    assert alone.why[0].startswith("memory: the plan needs")
    assert alone.why[1].startswith("computation:")


def test_an_account_opens_with_rates_the_fullest_rank_and_the_best_change() -> None:
    found = choose(LLAMA, MACHINES, 64, 64, 8192, keep=2)
    told = account(LLAMA, PLANS["tensor parallel"], MACHINES, found)
    assert told.throughput is not None
    assert told.throughput.tokens * told.seconds == pytest.approx(64 * 8192)
    assert told.throughput.device_hours == pytest.approx(64 * 1e9 / told.throughput.tokens / 3600)
    rates, step, best = told.opening
    assert "tokens/s" in rates
    assert "on the fullest rank" in step
    assert best == f"what would help most: {told.changes[0]}"
    assert told.changes[0].what.startswith("the plan with ")
    assert account_text(told).splitlines()[1:4] == [f"  {line}" for line in told.opening]


@pytest.mark.parametrize("name", PLANS)
def test_changes_save_time_and_belong_to_the_plan(name: str) -> None:
    plan = PLANS[name]
    found = changes(LLAMA, plan, MACHINES)
    assert [c.times for c in found] == sorted(c.times for c in found)
    assert all(0 < c.times < 1 for c in found)
    text, assumed = " ".join(map(str, found)), " ".join(assumptions(LLAMA, plan, MACHINES))
    assert ("no recomputation" in text) == (plan.recompute != "none")
    assert plan.tp > 1 or "tensor parallelism" not in text + assumed
    assert ("messages between stages" in assumed) == (plan.pp > 1)
    one_node = replace(plan, dp=8, tp=1, pp=1, cp=1, chunks=1, schedule="1F1B")
    assert "network" not in " ".join(map(str, changes(LLAMA, one_node, MACHINES)))


def test_recipes_are_those_of_models_with_experts_too_and_say_what_does_not_fit() -> None:
    model, there = KNOWN_RECIPES["Mixtral 8x7B, 64 x H100"].model, cluster("16xH100, 8 per node, 400G")
    plan = Plan(dp=16, ep=8, zero=1, batch=64, sequence=4096)
    found = nearest_recipes(model, plan, there)
    assert all(priced.plan.ep > 1 for _, priced in found)
    assert found[0][0].startswith("Mixtral")
    told = account(model, plan, there)
    assert [("does not fit" in r.how) for r in told.recipes] == [r.nbytes > usable_memory(there) for r in told.recipes]
    recipes = account_text(told).partition("known recipes")[2]
    assert all(r.how in recipes for r in told.recipes)


def test_a_small_model_on_many_ranks_is_told_of_fewer_ranks_and_of_its_host() -> None:
    small, there = Transformer(30, 576, 9, 3, 64, 1536, 49152, tied=True), cluster("256xH100, 8 per node, 400G")
    choice = choose(small, there, 256, 256, 2048, schedule="1F1B", recompute="none")
    plan = choice.best.plan
    told = changes(small, plan, there, choice=choice)
    fewer = [change for change in told if change.ranks < 1]
    assert [change.what for change in fewer] == [f"{int(256 * fewer[0].ranks)} ranks"]
    assert fewer[0].times <= 1.3
    assert fewer[0].times * fewer[0].ranks < 1
    assert "device graphs" in " ".join(map(str, told))
    assert not any(change.ranks < 1 for change in changes(small, plan, there))
    assert not nearest_recipes(small, plan, there)  # the recipes of models that are 60 times larger


def test_assumptions_say_what_a_device_lacks() -> None:
    def told(device: str, **fields: Any) -> str:
        return " ".join(assumptions(LLAMA, Plan(dp=8, batch=8, **fields), cluster(f"8x{device}")))

    assert "no fast products in bf16" in told("V100")
    assert "no fast products in bf16" not in told("V100", precision="fp16") + told("A100")
    assert "no measured run" in told("L40S")
    assert "no measured run" not in told("A100")


@pytest.mark.parametrize(
    ("dtype", "rate"), [(torch.float32, "f32 at 76 % of the 19.5"), (torch.bfloat16, "bf16 at 76 %")]
)
def test_assumptions_of_a_module_name_the_numbers_of_its_products(dtype: torch.dtype, rate: str) -> None:
    with torch.device("meta"):
        model, x = torch.nn.Linear(64, 64, dtype=dtype), torch.empty(64, 64, dtype=dtype)
    best, *_ = mw.plan(model, (x, x), torch.nn.functional.mse_loss, cluster="2xA100")
    told = " ".join(best.account().assumed)
    assert rate in told
    assert ("products of bf16 would run" in told) == (dtype == torch.float32)


@pytest.mark.parametrize("batch", [{"input": torch.empty(4, 4)}, torch.empty(4, 4)])
def test_a_batch_that_is_no_list_is_refused(batch: Any) -> None:
    with pytest.raises(mw.BatchError, match="in the order of the model's forward pass"):
        mw.plan(torch.nn.Linear(4, 4), batch, cluster="2xA100")


@pytest.mark.parametrize("name", ["Llama-3-70B, 64 x H100", "Mixtral 8x7B, 64 x H100"])
def test_the_nearest_recipe_to_its_own_plan_is_the_plan(name: str) -> None:
    recipe = KNOWN_RECIPES[name]
    there = cluster(recipe.cluster)
    (first, priced), (other, _) = nearest_recipes(recipe.model, recipe.plan, there)
    assert first.startswith(name)
    assert priced.plan == recipe.plan
    assert priced.seconds == pytest.approx(simulate_step(recipe.model, recipe.plan, there))
    assert other != first


def test_a_search_reports_its_progress() -> None:
    steps: list[float] = []
    choose(LLAMA, MACHINES, 8, 8, 2048, on_step=lambda done, of: steps.append(done / of))
    assert steps == sorted(steps)
    assert 0 <= steps[0]
    assert 0.5 < steps[-1] < 1


def test_memory_curves_reach_the_peak_of_ranks() -> None:
    told = account(LLAMA, PLANS["1F1B"], MACHINES)
    assert told.timeline is not None
    for curve, (rank, parts) in zip(told.curves, told.held.items(), strict=True):
        assert curve.rank == rank
        assert max(held for _, held in curve.points) == pytest.approx(sum(parts.values()))
        assert [when for when, _ in curve.points] == sorted(when for when, _ in curve.points)


def llama() -> tuple[Llama, list[torch.Tensor]]:
    with torch.device("meta"):
        model = Llama(LlamaConfig(vocab=512, hidden=256, layers=2, heads=4, kv_heads=2, feed_forward=512))
        return model, [torch.empty(16, 128, dtype=torch.long) for _ in range(2)]


def test_data_of_a_mesh_plan_equals_its_explanation() -> None:
    model, batch = llama()
    program = capture(model, model, batch).program
    steps: list[tuple[int, int]] = []
    best, *others = plan_mesh(program, cluster("8xH100"), 8, lambda done, of: steps.append((done, of)))
    assert steps == [(n, 5) for n in range(5)], "four numbers of shares, and pipelines"
    for plan in (best, *others):
        told = plan.account(others)
        assert sum(told.spent.values()) == pytest.approx(plan.seconds) == told.seconds
        assert sum(told.held["every rank"].values()) == pytest.approx(plan.nbytes)
        assert len(told.laid) == len([*model.parameters()]) + len(batch)
        assert len(told.rivals) == len(others)
        conversions = [row for row in told.sent if row.where != "after the backward pass"]
        assert sum(row.seconds for row in conversions) == pytest.approx(told.spent["conversions"])
        assert all(row.kind != "none" for row in conversions)
    cut = next(p for p in (best, *others) if p.tp == 8)
    assert any("_llama.py" in row.source for row in cut.account().sent)


def test_a_plan_read_from_a_file_has_no_explanation() -> None:
    model, batch = llama()
    found = plan_mesh(capture(model, model, batch).program, cluster("8xH100"), 8)[0]
    for ask in (lambda: replace(found, cuts=None).account(), lambda: replace(found, cuts=None).explain()):
        with pytest.raises(SearchError, match="not their costs"):
            ask()


def test_a_program_is_priced_node_by_node() -> None:
    def step() -> Any:
        torch.manual_seed(0)
        mesh = mw.ProcessMesh([0, 1], ["tp"])
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        model[0].weight = mw.shard_tensor(model[0].weight, mesh, [mw.Shard(0)])
        made = mw.to_static(
            model, loss=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
        )
        made(torch.ones(4, 8), torch.ones(4, 8))
        return made.program

    program = mw.simulate(step, 2)[0]
    machines = cluster("2xH100")
    told = program_account(program, machines, 2)
    assert told.seconds == pytest.approx(sum(told.spent.values()))
    assert [row.kind for row in told.sent] == ["AllReduce(tp)"]
    assert told.sent[0].seconds == pytest.approx(told.spent["communication"])
    assert "test_accounts.py" in told.sent[0].source
    assert {row.layout for row in told.laid} >= {"f32[16@tp, 8]", "f32[8, 16@tp]"}
    (curve,) = told.curves
    assert max(held for _, held in curve.points) == told.nbytes


def test_closed_forms_and_tables_price_the_same_plan() -> None:
    """The account's parts come from both: without a pipeline they are the same."""
    for name in ("replicas", "tensor parallel", "ZeRO-3"):
        told = account(LLAMA, PLANS[name], MACHINES)
        assert told.seconds == pytest.approx(float(np.asarray(predict(LLAMA, PLANS[name], MACHINES).seconds)))
