"""Options of a strategy: each shows in the program with the same numbers, or is refused with a reason; and TOML."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.engine import StrategyError, strategy_from_toml, strategy_to_toml
from meshwright.engine.recording.strategy import (
    DpOptimization,
    FusedPasses,
    MixedPrecision,
    MpOptimization,
    Pipeline,
    Recomputing,
    Sharding,
    SpOptimization,
)
from meshwright.graph import Program, communication
from meshwright.models import Llama, LlamaConfig, mark
from meshwright.passes import Amp, Bucket, Hierarchy
from meshwright.pipeline import schedule_by_name

SMALL = LlamaConfig(vocab=32, hidden=32, layers=2, heads=4, kv_heads=4, feed_forward=48)
PLAIN: dict[str, Any] = {
    "dp_optimization": DpOptimization(False),
    "mp_optimization": MpOptimization(False),
    "inplace": False,
    "foreach": False,
}
OFF: dict[str, Any] = {
    "dp_optimization": {"enable": False},
    "mp_optimization": {"enable": False},
    "inplace": False,
    "foreach": False,
}


def run(strategy: mw.Strategy) -> tuple[list[float], Program, dict[str, Any]]:
    """Return the losses of three steps, the program, and the layout of the first big matrix and its states."""

    def rank() -> Any:
        mesh = mw.ProcessMesh(np.arange(4).reshape(1, 2, 2), ["pp", "dp", "tp"])
        model = Llama(SMALL)
        mark(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        dist_model = mw.to_static(model, None, None, optimizer, strategy)
        generator = torch.Generator().manual_seed(0)
        found: list[float] = []
        for _ in range(3):
            tokens = [torch.randint(0, 32, (4, 8), generator=generator) for _ in range(2)]
            found.append(dist_model(*[mw.shard_tensor(t, mesh["pp", 0], [mw.Shard(0)]) for t in tokens]).item())
        weight = model.blocks[0].attention.q.weight
        lies = {"weight": weight.spec, "state": optimizer.state[weight]["exp_avg"].spec}
        return found, dist_model.program, lies

    return mw.simulate(rank, 4)[0]


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], Program, dict[str, Any]]:
    return run(mw.Strategy(**PLAIN))


def kinds(program: Program) -> Counter[str]:
    return Counter(f"{n.origin.phase} {type(n.op.step).__name__}" for n in communication(program))


def test_without_passes_gradients_are_reduced_one_by_one(plain: Any) -> None:
    assert kinds(plain[1])["backward AllReduce"] > 20


def test_buckets_and_shared_conversions_are_on_by_default(plain: Any) -> None:
    losses, program, _ = run(mw.Strategy())
    assert losses == plain[0]
    assert kinds(program)["backward AllReduce"] <= 10
    assert {"bucket", "in_place", "foreach"} <= {c.by for c in program.changes}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharding_shards_states_gradients_and_parameters(stage: int, plain: Any) -> None:
    losses, program, lies = run(mw.Strategy(sharding=Sharding(True, stage, least=64), **PLAIN))
    assert losses == pytest.approx(plain[0], rel=1e-5)
    cut = "f32[32@tp@dp, 32]"
    assert repr(lies["state"]) == cut
    assert (repr(lies["weight"]) == cut) == (stage == 3)
    found = kinds(program)
    assert (found["update AllGather"] > 0) == (stage < 3)
    assert (found["forward AllGather"] > 1) == (stage == 3)  # one is that of the loss
    assert (found["backward AllGather"] > 0) == (stage == 3)
    scattered = sum(n for kind, n in found.items() if kind.endswith("ReduceScatter"))
    assert (scattered > 0) == (stage > 1)


def test_parameters_may_stay_whole_until_the_backward_pass(plain: Any) -> None:
    losses, program, _ = run(mw.Strategy(sharding=Sharding(True, 3, least=64, regather=False), **PLAIN))
    assert losses == pytest.approx(plain[0], rel=1e-5)
    assert kinds(program)["backward AllGather"] == 0


def test_sequence_parallelism_scatters_and_gathers(plain: Any) -> None:
    losses, program, _ = run(mw.Strategy(sp_optimization=SpOptimization(True), **PLAIN))
    assert losses == pytest.approx(plain[0], rel=1e-5)
    found = kinds(program)
    assert found["forward ReduceScatter"] == 5  # two a block, and the embedding's
    assert found["forward AllGather"] == 6  # that of the loss, too


@pytest.mark.parametrize("how", [{"layers": ("blocks.*",)}, {"budget": 0.5}])
def test_recompute_keeps_the_numbers(how: dict[str, Any], plain: Any) -> None:
    losses, program, _ = run(mw.Strategy(recompute=Recomputing(True, **how), **PLAIN))
    assert losses == plain[0]
    assert any(c.by == "recompute" for c in program.changes)


def test_fusing_passes_find_plain_operators_of_the_model(plain: Any) -> None:
    losses, _, _ = run(mw.Strategy(fused_passes=FusedPasses(True), **PLAIN))
    assert losses == pytest.approx(plain[0], rel=1e-5)


def test_mixed_precision_multiplies_in_bfloat16(plain: Any) -> None:
    losses, program, _ = run(mw.Strategy.of(amp={"enable": True}, **OFF))
    assert losses == pytest.approx(plain[0], rel=2e-2)
    assert losses != plain[0]
    products = [n for n in program.nodes if str(n.op) == "aten.mm.default"]
    assert products
    assert {n.outs[0].dtype for n in products} == {torch.bfloat16}
    assert {i.value.dtype for i in program.inputs if i.role == "parameter"} == {torch.float32}


def test_a_batch_in_pieces_reduces_gradients_once(plain: Any) -> None:
    losses, program, _ = run(mw.Strategy.of(gradient_merge={"enable": True, "k_steps": 2}, **OFF))
    assert losses == pytest.approx(plain[0], rel=1e-5)
    gradients, once = (
        [n for n in communication(p) if repr(n.op) == "AllReduce(dp)" and len(n.outs[0].shape) == 2]
        for p in (program, plain[1])
    )
    assert len(gradients) == len(once)


@pytest.mark.parametrize("option", ["foreach", "release"])
def test_updates_are_grouped_or_made_early(option: str, plain: Any) -> None:
    losses, program, _ = run(mw.Strategy.of(**{**OFF, option: True}))
    assert losses == plain[0]
    assert any(c.by == option for c in program.changes)


def test_early_release_replaces_grouping() -> None:
    passes = [p.name for p in mw.Strategy(release=True).passes_on("recorded")]
    assert "release" in passes
    assert "foreach" not in passes


def test_user_defined_passes_run_last(plain: Any) -> None:
    losses, program, _ = run(mw.Strategy(passes=(Bucket(bytes=4096),), **PLAIN))
    assert losses == plain[0]
    assert [c.by for c in program.changes][-1] == "bucket"


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Sharding(True, 4), "stage"),
        (lambda: Recomputing(True), "budget"),
        (lambda: Recomputing(True, ("a",), 0.5), "budget"),
        (lambda: FusedPasses(True, ("fuse_everything",)), "fuse_norm"),
        (lambda: Pipeline(accumulate_steps=0), "microbatch"),
        (lambda: mw.Strategy.of(pipeline={"enable": True}, release=True), "release"),
        (lambda: mw.Strategy.of(pipeline={"enable": True}, gradient_merge={"enable": True, "k_steps": 2}), "split"),
        (lambda: mw.Strategy.of(amp={"enable": True, "dtype": "float64"}), "bfloat16"),
        (lambda: mw.Strategy.of(amp={"init_loss_scaling": 0.0}), "positive"),
        (lambda: mw.Strategy.of(amp={"decr_ratio": 2.0}), "decr_ratio"),
        (lambda: mw.Strategy.of(amp={"enable": True, "dtype": "float16"}, release=True), "release"),
        (lambda: mw.Strategy(passes=(Amp(torch.float16),)), "loss scale"),
        (lambda: mw.Strategy.of(gradient_merge={"k_steps": 0}), "piece"),
        (lambda: mw.Strategy(compiler="cinn"), "inductor"),
        (lambda: strategy_from_toml("[sharding]\nenabled = true"), "enable"),
        (lambda: strategy_from_toml("shardings = 1"), "sharding"),
        (lambda: strategy_from_toml('[sharding]\nstage = "two"'), "int"),
        (lambda: strategy_from_toml('[[passes]]\nname = "buckets"'), "bucket"),
        (lambda: strategy_from_toml("[sharding"), "TOML"),
    ],
)
def test_impossible_options_are_refused(make: Callable[[], Any], word: str) -> None:
    with pytest.raises(StrategyError, match=word):
        make()


@pytest.mark.parametrize(
    "strategy",
    [
        mw.Strategy(),
        mw.Strategy(compiler="inductor", full_graph=False, max_programs=3),
        mw.Strategy(sharding=Sharding(True, 3, ("dp", "ep"), 64), recompute=Recomputing(True, budget=0.25)),
        mw.Strategy(passes=(Bucket(bytes=2**20), Hierarchy("gpu", "node"))),
        mw.Strategy(fused_passes=FusedPasses(True, ("fuse_norm",))),
        mw.Strategy.of(amp={"enable": True, "dtype": "float16", "init_loss_scaling": 8.0, "incr_every_n_steps": 3}),
    ],
)
def test_a_strategy_is_written_to_toml_and_read_back(strategy: mw.Strategy) -> None:
    assert strategy_from_toml(strategy_to_toml(strategy)) == strategy


TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(schedule=TEXT, layers=st.lists(TEXT, min_size=1), axes=st.lists(TEXT), budget=st.floats(allow_nan=False))
def test_any_text_in_a_strategy_is_read_back(schedule: str, layers: list[str], axes: list[str], budget: float) -> None:
    """The table of a schedule has several lines; TOML is also read from a file."""
    strategy = mw.Strategy(
        pipeline=Pipeline(schedule_mode=schedule),
        recompute=Recomputing(True, layers=tuple(layers)),
        sharding=Sharding(axes=tuple(axes)),
        passes=(Hierarchy(schedule, layers[0]), replace(Bucket(), bytes=7)),
        amp=replace(MixedPrecision(), init_loss_scaling=abs(budget) or 1.0) if abs(budget) < inf else MixedPrecision(),
    )
    text = strategy_to_toml(strategy)
    assert strategy_from_toml(text.encode().decode()) == strategy
    assert tomllib.loads(text)["recompute"]["layers"] == layers


def test_a_strategy_with_a_schedule_as_a_table_is_read_back() -> None:
    strategy = mw.Strategy(
        pipeline=Pipeline(True, schedule_mode=str(schedule_by_name("1F1B").make(2, 4)), accumulate_steps=4)
    )
    assert "\n" in strategy.pipeline.schedule_mode
    assert strategy_from_toml(strategy_to_toml(strategy)) == strategy
