"""Plans of training and generation: laws of their times, bytes and moves of weights, and the search for a pair."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import meshwright as mw
from benchmarks._law_cases import plan_at
from meshwright.cost import cluster, cluster_of
from meshwright.generate._step_runs import BLOCK
from meshwright.search import (
    MESHWRIGHT,
    Experts,
    GenerationSizes,
    Plan,
    SamplerLayout,
    SearchError,
    Transformer,
    choose,
    generation_bytes,
    generation_seconds,
    hold,
    plan_phases,
    predict,
    received_bytes,
    usable_memory,
    weight_move,
)
from meshwright.search.phase_plans.generation import sampler_layouts
from meshwright.search.transformer_plans.candidates import candidates
from meshwright.weights import Synced

LLAMA = Transformer(32, 4096, 32, 8, 128, 14336, 128256)
SMALL = Transformer(2, 64, 4, 4, 16, 128, 256)
SIZES = GenerationSizes(prompts=32, prompt_tokens=512, new_tokens=512, samples=4)
MACHINES = cluster("8xH100")
STYLES = {
    "model.embed_tokens": mw.VocabParallel(),
    "model.layers.*.self_attn.[qkv]_proj": mw.ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": mw.RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": mw.ColwiseParallel(),
    "model.layers.*.mlp.up_proj": mw.ColwiseParallel(),
    "model.layers.*.mlp.down_proj": mw.RowwiseParallel(),
    "lm_head": mw.ColwiseParallel(),
}
PLAN: Any = mw.plan
"""Called as by a program without types."""
PHASES = ("train", "generate")
TRAINED = [Plan(dp=4), Plan(dp=4, zero=2), Plan(dp=2, tp=2, zero=1), Plan(dp=2, tp=2, zero=3), Plan(tp=4)]


def config() -> Any:
    from transformers import LlamaConfig

    m = SMALL
    return LlamaConfig(
        vocab_size=m.vocab, hidden_size=m.hidden, intermediate_size=m.ffn, num_hidden_layers=m.layers,
        num_attention_heads=m.heads, num_key_value_heads=m.kv_heads, max_position_embeddings=64,
    )  # fmt: skip


def llama(mesh: mw.ProcessMesh, zero: int = 0, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the model with the sizes of `SMALL`, marked for a mesh."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model: Any = LlamaForCausalLM(config())
        model = model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mw.parallelize(model, optimizer, mesh, mw.Parallelism(STYLES, zero=zero))
    return model


def mesh_of(dp: int, tp: int) -> mw.ProcessMesh:
    return mw.ProcessMesh(np.arange(dp * tp).reshape(dp, tp), ["dp", "tp"])


@pytest.mark.parametrize("plan", TRAINED, ids=lambda plan: f"dp {plan.dp} tp {plan.tp} zero {plan.zero}")
def test_the_bytes_of_a_move_are_those_of_sync(plan: Plan) -> None:
    layouts = [SamplerLayout(4, 1), SamplerLayout(2, 2), SamplerLayout(1, 4)]

    def synced() -> list[Synced]:
        trainer = llama(mesh_of(plan.dp, plan.tp), plan.zero)
        return [mw.weights.sync(trainer, llama(mesh_of(at.replicas, at.tp), device="meta")) for at in layouts]

    ranks = mw.simulate(synced, 4)
    for n, layout in enumerate(layouts):
        move = weight_move(SMALL, plan, layout, MACHINES)
        assert [received_bytes(SMALL, plan, layout, rank) for rank in range(4)] == [s[n].received for s in ranks]
        assert move.received == max(s[n].received for s in ranks)
        matrices = [name for name in ranks[0][n].copied if "norm" not in name]
        assert move.is_shared == (not matrices)


def test_a_stage_of_a_pipeline_receives_the_other_layers() -> None:
    plan, layout = Plan(pp=2, tp=2), SamplerLayout(2, 2)
    assert sum(received_bytes(SMALL, plan, layout, rank) for rank in range(4)) == 2 * SMALL.parameters


def test_waves_take_less_memory_and_more_time() -> None:
    plan, found = Plan(dp=8, batch=128, sequence=1024), []
    for layout in (SamplerLayout(2, 4), SamplerLayout(2, 4, waves=4)):
        held = generation_bytes(LLAMA, plan, layout, SIZES, 0)
        found.append((held["cache"], generation_seconds(LLAMA, layout, SIZES, MACHINES).total))
    assert found[1][0] == found[0][0] / 4
    assert found[0][1] < found[1][1] < 4 * found[0][1]


def test_equal_layouts_share_memory() -> None:
    plan, layout = Plan(dp=2, tp=4, zero=1, batch=128, sequence=1024), SamplerLayout(2, 4)
    move = weight_move(LLAMA, plan, layout, MACHINES)
    assert (move.received, move.seconds, move.is_shared) == (0, 0.0, True)
    held = generation_bytes(LLAMA, plan, layout, SIZES, move.received)
    states = sum(hold(LLAMA, plan).parts[name] for name in ("parameters and gradients", "optimizer"))
    cache = 128 // 2 * 1024 * 32 * (8 // 4) * 2 * 128 * 2
    assert sum(held.values()) == states + cache + held["bucket"] + held["temporary"]
    assert held["bucket"] == held["sampler's weights"] == 0


def test_a_decode_step_is_bound_by_the_memory() -> None:
    layout, sizes = SamplerLayout(1, 1), GenerationSizes(prompts=1, prompt_tokens=64, new_tokens=64)
    software = replace(MESHWRIGHT, graphs=frozenset(("attention", "feed-forward")))
    machines = cluster_of("H100")
    step = generation_seconds(LLAMA, layout, sizes, machines, software).step
    least = 2 * (LLAMA.parameters - LLAMA.embedding_parameters) / machines.device.bandwidth
    assert least < step < 1.7 * least


def test_the_pair_is_the_best_of_all() -> None:
    """No pipelines, whose closed form differs from the simulated step."""
    given: dict[str, Any] = {"pp": 1, "recompute": "full", "microbatch": 1}
    best = plan_phases(LLAMA, MACHINES, 8, SIZES, **given)[0]
    layouts = list(sampler_layouts(LLAMA, 8, 8, SIZES))
    generated = [generation_seconds(LLAMA, layout, SIZES, MACHINES).total for layout in layouts]
    found: list[float] = []
    for plans in candidates(LLAMA, 8, SIZES.rows, SIZES.positions, "bf16", 8, given):
        for row in range(len(plans.dp)):
            plan = plan_at(plans, row)
            trained, held = float(predict(LLAMA, plan, MACHINES).seconds), float(hold(LLAMA, plan).nbytes)
            for layout, spent in zip(layouts, generated, strict=True):
                move = weight_move(LLAMA, plan, replace(layout, waves=1), MACHINES)
                beside = sum(generation_bytes(LLAMA, plan, layout, SIZES, move.received).values())
                if max(held, float(beside)) <= usable_memory(MACHINES):
                    found.append(trained + move.seconds + spent)
    least = min(found)
    assert best.seconds == pytest.approx(least)
    assert best.seconds == sum(best.seconds_of.values())
    assert best.nbytes <= best.memory_limit


def test_plans_are_sorted_and_the_runner_up_is_told() -> None:
    best, *others = plan_phases(LLAMA, MACHINES, 8, SIZES, pp=1)
    assert [plan.seconds for plan in others] == sorted(plan.seconds for plan in others)
    text = best.explain(others)
    assert f"the runner-up takes {others[0].seconds / best.seconds:.3f} of the time" in text
    assert "assumed:" in text
    assert "the host starts a layer" in text
    graphs = replace(MESHWRIGHT, graphs=frozenset(("attention", "feed-forward")))
    started = plan_phases(LLAMA, MACHINES, 8, SIZES, software=graphs, pp=1, tp=1)[0]
    assert "device graphs start attention and feed-forward" in started.explain()
    assert "the runner-up" not in best.explain()


def test_the_error_names_sizes_that_fit() -> None:
    with pytest.raises(SearchError, match="are missing on each rank") as caught:
        plan_phases(LLAMA, cluster_of("A100-40GB"), 2, SIZES, pp=1)
    found = re.search(r"use ([\d,]+) ranks", str(caught.value))
    assert found is not None
    assert plan_phases(LLAMA, cluster_of("A100-40GB"), int(found[1].replace(",", "")), SIZES, pp=1)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: plan_phases(replace(LLAMA, experts=Experts(8, 2, 64)), MACHINES, 8, SIZES), "with experts"),
        (lambda: GenerationSizes(0, 1, 1), "prompts = 0"),
        (lambda: plan_phases(SMALL, MACHINES, 0, SIZES), "at least 1"),
        (lambda: choose(SMALL, MACHINES, -1, 8, 64), "at least 1"),
        (lambda: PLAN(SMALL, phases=("generate", "train"), generation=SIZES), "another order"),
        (lambda: PLAN(SMALL, phases=["train", "generate"]), "generation=None"),
        (lambda: PLAN(SMALL, phases=PHASES), "generation=None"),
        (lambda: PLAN(SMALL, [1], phases=PHASES, generation=SIZES), "leave out batch"),
        (lambda: PLAN(torch.nn.Linear(2, 2), ranks=8, phases=PHASES, generation=SIZES), "no configuration"),
        (lambda: PLAN(torch.nn.Linear(2, 2)), "no batch"),
    ],
)
def test_bad_requests_are_refused(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(mw.MeshwrightError, match=said):
        call()


def test_the_facts_about_the_sampler_are_those_of_the_code() -> None:
    assert inspect.signature(mw.sampler).parameters["ask_every"].default == MESHWRIGHT.ask_every
    assert inspect.signature(mw.weights.sync).parameters["memory_cap"].default == MESHWRIGHT.bucket
    assert MESHWRIGHT.cache_block == BLOCK


def test_both_layouts_of_a_plan_run() -> None:
    sizes = GenerationSizes(prompts=2, prompt_tokens=4, new_tokens=4, samples=2)
    plans = mw.plan(config(), cluster="4xH100", stages=1, phases=("train", "generate"), generation=sizes)
    plan = next(plan for plan in plans if not plan.move.is_shared)
    prompts, one = torch.arange(8).view(2, 4), mesh_of(1, 1)

    def go(train_mesh: mw.ProcessMesh, sampler_mesh: mw.ProcessMesh, zero: int) -> tuple[torch.Tensor, float, int]:
        trainer = llama(train_mesh, zero, dtype=torch.float32)
        sampler = mw.sampler(llama(sampler_mesh, device="meta", dtype=torch.float32))
        received = mw.weights.sync(trainer, sampler).received
        new = sampler.generate(prompts, sizes.new_tokens, n=sizes.samples, batch_size=plan.batch_size, seed=1).tokens
        sampler.sleep()
        rows = torch.cat([prompts.repeat_interleave(sizes.samples, 0), new], 1)
        return new, trainer(input_ids=rows, labels=rows).loss.item(), received

    ranks = mw.simulate(lambda: go(plan.train_mesh, plan.sampler_mesh, plan.train.zero), 4)
    assert max(received for *_, received in ranks) == 2 * plan.move.received  # single precision
    tokens, loss, _ = ranks[0]
    wanted, other, _ = mw.simulate(lambda: go(one, one, 0), 1)[0]
    assert torch.equal(tokens, wanted)
    assert loss == pytest.approx(other)
