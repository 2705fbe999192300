"""Pipelines for modules: stages held beside all ways to share layers out; when there is one, and why not."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, pairwise
from math import inf

import pytest
import torch
from torch import Tensor, nn

from meshwright.cost import Cluster, cluster
from meshwright.graph import Program, capture
from meshwright.pipeline import Schedule, Shape, known, peaks, simulate
from meshwright.search import MeshPlan, SearchError, parse_mesh_plan, plan_mesh
from meshwright.search._balance import SCHEDULES, SHORTER, balance
from meshwright.search._layer_costs import LayerCosts
from meshwright.search._starts import in_order

from .chains import ODD, Block, Blocks


class Coder(nn.Module):
    """Two lists of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (nn.ModuleList(Block(8) for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.encoder, *self.decoder):
            x = layer(x)
        return x


def captured(model: nn.Module, *batch: Tensor) -> Program:
    return capture(model, lambda x: model(x).square().mean(), batch).program


def machines(text: str, memory: float) -> Cluster:
    usual = cluster(text)
    return replace(usual, device=replace(usual.device, memory=memory))


def drawn(layers: int, seed: int, alike: bool = False) -> LayerCosts:
    """Layers that take anything; `alike`: all but the first and the last take the same."""
    draw = random.Random(seed)

    def row() -> tuple[float, ...]:
        numbers = [draw.choice((0.5, 1.0, 3.0)) for _ in range(layers)]
        return (numbers[0], *numbers[1:2] * (layers - 2), numbers[-1]) if alike else tuple(numbers)

    return LayerCosts(*(row() for _ in range(10)))


@lru_cache
def tables(stages: int, microbatches: int) -> list[Schedule]:
    """All that the search may choose from."""
    shape = Shape(stages, microbatches)
    return [known(name).make(stages, microbatches) for name in SCHEDULES if known(name).holds(shape)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (3, 3), (3, 6), (4, 8)])
def test_stages_are_as_fast_as_any(seed: int, stages: int, microbatches: int) -> None:
    layers = drawn(8, seed, alike=seed == 4)
    takes: list[tuple[float, float]] = []
    for starts in combinations(range(1, 8), stages - 1):
        costs = layers.stages(starts)
        times = costs.times(lambda n: 0.1 * n)
        takes += [(max(peaks(t, costs.memory)), simulate(t, times).makespan) for t in tables(stages, microbatches)]
    fewest = min(held for held, _ in takes)
    for room in (inf, 1.15 * fewest, 0.999 * fewest):
        found = balance(layers, stages, microbatches, room, lambda n: 0.1 * n)
        if room < fewest:
            assert found is None
            continue
        assert found is not None
        assert max(found.held) <= room
        assert found.timeline.makespan <= min(seconds for held, seconds in takes if held <= room) * (1 + SHORTER)


@pytest.mark.parametrize("message", [0.0, 0.1])
def test_what_a_step_takes_at_the_least_is_no_more_than_it_takes(message: float) -> None:
    layers, count = drawn(9, 0), 0
    for table in tables(3, 6):
        bounds = [*in_order(layers, table, inf, lambda n: message * n)]
        assert [bound for bound, _, _ in bounds] == sorted(bound for bound, _, _ in bounds)
        assert sorted(starts for _, _, starts in bounds) == [*combinations(range(1, 9), 2)]
        for bound, _, starts in bounds:
            line = simulate(table, layers.stages(starts).times(lambda n: message * n))
            assert bound <= line.makespan * (1 + 1e-9)
            count += bound >= line.makespan * 0.98
    assert count > 20


@pytest.mark.parametrize("seed", range(5))
def test_what_a_stage_holds_is_what_its_parts_sum_to(seed: int) -> None:
    layers = drawn(6, seed)
    found = balance(layers, 3, 6, inf, lambda n: 0.0)
    assert found is not None
    cuts = (0, *found.starts, 6)
    for stage, (a, b) in enumerate(pairwise(cuts)):
        each = sum(layers.held[a:b]) + (layers.sent[a - 1] if a else 0.0)
        alive = peaks(found.schedule)[stage]
        held = sum(layers.static[a:b]) + max(layers.brief[a:b]) + alive * each
        assert found.held[stage] == pytest.approx(held)


@pytest.mark.parametrize("machine", ["4xA100-40GB, 1 per node, 10G", "4xH100"])
def test_a_pipeline_is_chosen_where_it_is_the_fastest_of_all(machine: str) -> None:
    with torch.device("meta"):
        program = captured(Blocks(4, 4095), torch.empty(64, 64, 4095))
    found = plan_mesh(program, cluster(machine), 4)
    without = plan_mesh(program, cluster(machine), 4, stages=1)
    by_hand = [plan for stages in (2, 4) for plan in plan_mesh(program, cluster(machine), 4, stages=stages)]
    assert not any(plan.pipeline for plan in without)
    assert all(plan.pipeline for plan in by_hand)
    best = min(plan.seconds for plan in (*without, *by_hand))
    assert found[0].seconds <= best * 1.006
    assert [p for p in found if p.pipeline is None] == [*without]
    assert bool(found[0].pipeline) == any(p.pipeline for p in found)


def short_of_memory() -> tuple[MeshPlan, ...]:
    """Weights that no axis cuts, and that ZeRO gathers one by one: five times a layer fits, and not seven times."""
    program = captured(Blocks(), torch.ones(4, ODD))
    return plan_mesh(program, machines("4xA100", 26e6), 4, states=2.0)


def test_a_model_that_fits_no_other_way_has_stages() -> None:
    with pytest.raises(SearchError):
        plan_mesh(captured(Blocks(), torch.ones(4, ODD)), machines("4xA100", 26e6), 4, stages=1)
    (plan,) = short_of_memory()
    assert plan.pipeline is not None
    assert plan.stages is not None
    assert plan.pipeline.split == ("layers.1", "layers.2", "layers.3")
    assert plan.mesh.sizes == {"pp": 4, "dp": 1, "tp": 1}
    weights = 4 * 4 * ODD * ODD
    assert sum(plan.stages.costs.static) == pytest.approx(weights * (1 + 1 + 2 + 1))
    assert plan.nbytes == max(plan.stages.held) <= 0.94 * 26e6


def test_a_plan_with_stages_is_printed_and_read_back() -> None:
    (plan,) = short_of_memory()
    again = parse_mesh_plan(plan.text())
    assert again == plan
    assert again.text() == plan.text()
    assert 'split = ["layers.1", "layers.2", "layers.3"]' in plan.text()
    told, account = plan.explain(), plan.account()
    assert "stage 3 from layers.3" in told
    assert [*account.held] == [f"stage {n}" for n in range(4)]
    assert sum(account.spent.values()) == pytest.approx(plan.seconds)
    assert account.timeline is not None
    for curve, held in zip(account.curves, plan.stages.held if plan.stages else (), strict=True):
        assert max(at for _, at in curve.points) == pytest.approx(held, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "batch", "said"),
    [
        (Blocks(4, 8, skips=True), (8, 8), "looks at several layers"),
        (Coder(), (8, 8), "layers in several lists, encoder and decoder"),
        (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), (8, 8), "behind its last layer"),
    ],
)
def test_what_is_no_chain_has_no_pipeline_and_says_so(model: nn.Module, batch: tuple[int, ...], said: str) -> None:
    program = capture(model, lambda x: model(x).mean(), [torch.ones(batch)]).program
    found = plan_mesh(program, cluster("4xA100"), 4)
    assert all(plan.pipeline is None for plan in found)
    assert any("no pipeline: " in note and said in note for note in found[0].notes)
    with pytest.raises(SearchError, match=said):
        plan_mesh(program, cluster("4xA100"), 4, stages=2)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("split = ['a', 'b']", "3 stages, along pp"),
        ("split = []", "names of modules"),
        ("split = ['a']\nschedule = 'soon'", "known by name"),
        ("split = ['a']\nmicrobatches = 0", "one microbatch or more"),
        ("microbatches = 2", "no split"),
    ],
)
def test_stages_that_are_none_are_refused(line: str, said: str) -> None:
    with pytest.raises(SearchError, match=said):
        parse_mesh_plan(f"{line}\n[mesh]\npp = 2\ndp = 2")
