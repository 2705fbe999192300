"""Pipelines for modules: stages compared with all divisions of the layers; reasons for having a pipeline or none."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, pairwise
from math import inf

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshwright.cost import Cluster, cluster, cluster_of
from meshwright.graph import Program, capture
from meshwright.layout import read_toml
from meshwright.pipeline import ChunkMemory, Schedule, ScheduleSizes, peaks, schedule_by_name, simulate_schedule
from meshwright.search import MeshPlan, SearchError, parse_mesh_plan, plan_mesh
from meshwright.search.module_plans.pipeline_search import Pipelines
from meshwright.search.module_plans.replicas import PlanRequest, Replicas
from meshwright.search.sharding.memory_saving import MemorySaving
from meshwright.search.sharding.sharding_search import ShardingProblem, Shardings
from meshwright.search.sharding.variable_elimination import aligned
from meshwright.search.stages import chunk_starts as chunk_starts
from meshwright.search.stages.balance import SHORTER, balance
from meshwright.search.stages.batched_step_time import BatchedStepTime, LayerSums
from meshwright.search.stages.chunk_starts import ChunkStarts
from meshwright.search.stages.layer_chain import chain_of
from meshwright.search.stages.layer_costs import LayerCosts, LinkTimes, layer_costs
from meshwright.search.stages.schedule_tables import IN_A_V, IN_LOOPS, SCHEDULES, one_chunk_tables, several_chunk_tables
from meshwright.search.stages.stage_starts import starts_by_bound

from .chains import ODD, Block, Blocks


class Coder(nn.Module):
    """A model with two lists of layers."""

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


def random_layers(layers: int, seed: int, alike: bool = False) -> LayerCosts:
    """Return random layer costs; with `alike`, all but the first and the last layer are equal."""
    draw = random.Random(seed)

    def row() -> tuple[float, ...]:
        numbers = [draw.choice((0.5, 1.0, 3.0)) for _ in range(layers)]
        return (numbers[0], *numbers[1:2] * (layers - 2), numbers[-1]) if alike else tuple(numbers)

    return LayerCosts(*(row() for _ in range(10)))


def links(message: float = 0.1, reduced: float = 0.05) -> LinkTimes:
    return LinkTimes(lambda nbytes: message * nbytes, lambda nbytes: reduced * nbytes)


@lru_cache
def tables(stages: int, microbatches: int, chunks: int = 1) -> list[Schedule]:
    """Return all schedules that the search may choose from."""
    names = SCHEDULES if chunks == 1 else {**IN_LOOPS, **IN_A_V} if chunks == 2 else IN_LOOPS
    shape = ScheduleSizes(stages, microbatches, chunks)
    return [how.build(*shape[:3]) for how in map(schedule_by_name, names) if how.holds(shape)]


def takes(layers: LayerCosts, table: Schedule, starts: tuple[int, ...], by: LinkTimes) -> tuple[float, float]:
    """Return bytes of the fullest rank and seconds of a step, summed rank by rank."""
    costs, way = layers.chunks(starts), table.ways[0]
    own = [[c for c, rank in enumerate(way) if rank == r] for r in range(table.ranks)]
    alive = peaks(table, ChunkMemory(held=costs.held))
    nbytes = [
        a + sum(costs.static[c] for c in chunks) + max(costs.brief[c] for c in chunks)
        for a, chunks in zip(alive, own, strict=True)
    ]
    once = [
        sum(costs.gathers[c] for c in chunks)
        + by.reduced(sum(costs.reduced[c] for c in chunks))
        + 2 * by.message(sum(costs.shared[c] for c in chunks))
        for chunks in own
    ]
    return max(nbytes), simulate_schedule(table, costs.times(by)).makespan + max(once)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (3, 3), (3, 6), (4, 8)])
def test_the_chosen_chunks_are_the_fastest(seed: int, stages: int, microbatches: int) -> None:
    layers, count = random_layers(8, seed, alike=seed == 4), 8
    all_of_them = [
        (*takes(layers, table, starts, links()), chunks)
        for chunks in range(1, count // stages + 1)
        for table in tables(stages, microbatches, chunks)
        for starts in combinations(range(1, count), chunks * stages - 1)
    ]
    fewest = min(held for held, *_ in all_of_them)
    for memory_limit in (inf, 1.15 * fewest, 0.999 * fewest):
        found = balance(layers, stages, microbatches, memory_limit, links())
        if memory_limit < fewest:
            assert found is None
            continue
        best, _ = min((seconds, chunks) for held, seconds, chunks in all_of_them if held <= memory_limit)
        assert found is not None
        assert max(found.held) <= memory_limit
        assert (max(found.held), found.seconds) == pytest.approx(takes(layers, found.schedule, found.starts, links()))
        assert found.seconds <= best * (1 + 2 * SHORTER)
        assert balance(layers, stages, microbatches, memory_limit, links(), best * (1 - SHORTER)) is None


@pytest.mark.parametrize("message", [0.0, 0.1])
def test_the_lower_bound_of_a_step_is_valid(message: float) -> None:
    layers, count, by = random_layers(9, 0), 0, links(message)
    for table in tables(3, 6):
        bounds = [*starts_by_bound(layers, table, inf, by)]
        assert [bound for bound, _, _ in bounds] == sorted(bound for bound, _, _ in bounds)
        assert sorted(starts for _, _, starts in bounds) == [*combinations(range(1, 9), 2)]
        for bound, _, starts in bounds:
            _, seconds = takes(layers, table, starts, by)
            assert bound <= seconds * (1 + 1e-9)
            count += bound >= seconds * 0.98
    assert count > 20


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("stages", "count"), [(2, 14), (3, 12), (4, 14)])
def test_local_search_of_chunks_comes_near_the_best(
    seed: int, stages: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = LayerSums(random_layers(count, seed, alike=seed == 4), links())
    every = [
        ChunkStarts(BatchedStepTime(layers, runs, inf)) for runs in several_chunk_tables(stages, 2 * stages, count)
    ]
    monkeypatch.setattr(chunk_starts, "ALL", 1)
    found: list[float] = []
    for runs in several_chunk_tables(stages, 2 * stages, count):
        search = ChunkStarts(BatchedStepTime(layers, runs, inf))
        while not search.is_done:
            before = search.best
            search.go_on()
            assert search.best <= before
        found.append(search.best.seconds)
    assert all(search.is_done for search in every)
    assert min(found) <= 1.06 * min(search.best.seconds for search in every)


@pytest.mark.parametrize("memory_limit", [inf, 90.0])
def test_several_chunks_are_never_slower_than_one(memory_limit: float) -> None:
    for seed in range(4):
        layers = random_layers(30, seed)
        best = balance(layers, 3, 9, memory_limit, links())
        assert best is not None
        for runs in one_chunk_tables(3, 9):
            for _, table, starts in [*starts_by_bound(layers, runs.schedule, memory_limit, links())][:20]:
                held, seconds = takes(layers, table, starts, links())
                assert held <= memory_limit
                assert best.seconds <= seconds * (1 + SHORTER)


@pytest.mark.parametrize("seed", range(5))
def test_the_memory_of_a_stage_is_the_sum_of_its_parts(seed: int) -> None:
    layers = random_layers(6, seed)
    found = balance(layers, 3, 6, inf, links(0.0))
    assert found is not None
    cuts, way = (0, *found.starts, 6), found.schedule.ways[0]
    for stage in range(3):
        own = [(a, b) for (a, b), at in zip(pairwise(cuts), way, strict=True) if at == stage]
        alive = peaks(found.schedule, ChunkMemory(held=found.costs.held))[stage]
        held = sum(sum(layers.static[a:b]) for a, b in own) + max(max(layers.brief[a:b]) for a, b in own) + alive
        assert found.held[stage] == pytest.approx(held)
        for chunk, (a, b) in enumerate(pairwise(cuts)):
            each = sum(layers.held[a:b]) + (layers.sent[a - 1] if a else 0.0)
            assert found.costs.held[chunk] == pytest.approx(each)


@pytest.mark.parametrize("machine", ["4xA100-40GB, 1 per node, 10G", "4xH100"])
def test_a_pipeline_is_chosen_if_it_is_the_fastest_plan(machine: str) -> None:
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
    """Return plans of weights that no axis shards, and that ZeRO gathers one by one: memory for about six layers."""
    program = captured(Blocks(), torch.ones(4, ODD))
    return plan_mesh(program, machines("4xA100", 26e6), 4, states=2.0)


def test_a_model_that_fits_only_in_stages_gets_stages() -> None:
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
    assert read_toml(plan.text())["split"] == ["layers.1", "layers.2", "layers.3"]
    told, account = plan.explain(), plan.account()
    assert "stage 3 from layers.3" in told
    assert [*account.held] == [f"stage {n}" for n in range(4)]
    assert sum(account.spent.values()) == pytest.approx(plan.seconds)
    assert account.timeline is not None
    for curve, held in zip(account.curves, plan.stages.held if plan.stages else (), strict=True):
        assert max(at for _, at in curve.points) == pytest.approx(held, rel=1e-6)


@pytest.mark.parametrize(("layers", "way"), [(4, (0, 1, 1, 0)), (8, (0, 1, 0, 1, 0, 1))])
def test_a_plan_lists_several_chunks_on_a_stage(layers: int, way: tuple[int, ...]) -> None:
    program = captured(Blocks(layers), torch.ones(4, ODD))
    usual = cluster_of("cpu core")
    small = replace(usual, device=replace(usual.device, memory=layers * 11.25e6))
    (plan,) = plan_mesh(program, small, 2)
    assert plan.pipeline is not None
    assert plan.stages is not None
    assert (plan.pipeline.way, plan.pipeline.stages) == (way, 2)
    assert plan.mesh.sizes == {"pp": 2, "dp": 1, "tp": 1}
    again = parse_mesh_plan(plan.text())
    assert again == plan
    assert again.text() == plan.text()
    assert read_toml(plan.text())["way"] == [*way]
    assert f"{len(way)} chunks on stages {' '.join(map(str, way))}" in plan.how
    told, account = plan.explain(), plan.account()
    begins = ("the beginning", *plan.pipeline.split)
    assert f"stage 1 from {', '.join(begins[c] for c, at in enumerate(way) if at)}: " in told
    assert account.decided["way"] == way
    assert sum(account.spent.values()) == pytest.approx(plan.seconds)
    for curve, held, kinds in zip(account.curves, plan.stages.held, account.held.values(), strict=True):
        assert max(at for _, at in curve.points) == pytest.approx(held, rel=1e-6)
        assert sum(kinds.values()) == pytest.approx(held)
    assert sum(plan.stages.static) == pytest.approx(layers * 4 * ODD * ODD * (1 + 1 + 2 + 1))


@pytest.mark.parametrize(
    ("model", "batch", "said"),
    [
        (Blocks(4, 8, skips=True), (8, 8), "reads results of several layers"),
        (Coder(), (8, 8), "the layers are in several lists: encoder and decoder"),
        (
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)),
            (8, 8),
            r"1.running_mean is computed in 1, before",
        ),
    ],
)
def test_a_model_without_a_chain_has_no_pipeline_and_a_reason(
    model: nn.Module, batch: tuple[int, ...], said: str
) -> None:
    program = capture(model, lambda x: model(x).mean(), [torch.ones(batch)]).program
    found = plan_mesh(program, cluster("4xA100"), 4)
    assert all(plan.pipeline is None for plan in found)
    assert any("no pipeline: " in note and said in note for note in found[0].notes)
    with pytest.raises(SearchError, match=said):
        plan_mesh(program, cluster("4xA100"), 4, stages=2)


@pytest.mark.parametrize(
    ("ranks", "memory", "stages", "said"),
    [
        (4, 40e9, 3, "3 divides none of the possible numbers of replicas"),
        (8, 40e9, 8, "each stage needs a layer, and the model has 4 repeated layers"),
        (1, 40e9, 2, "stages need several ranks"),
        (4, 1e3, 2, "equal stages need at least"),
    ],
)
def test_refused_stages_name_the_condition_with_its_numbers(ranks: int, memory: float, stages: int, said: str) -> None:
    program = captured(Blocks(4, 8), torch.ones(8, 8))
    with pytest.raises(SearchError, match=said) as error:
        plan_mesh(program, machines("4xA100", memory), ranks, stages=stages)
    assert error.value.asked == f"a plan with {stages} stages on {ranks} ranks"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("split = ['a', 'b']", "3 stages, along pp"),
        ("split = []", "names of modules"),
        ("split = ['a']\nschedule = 'soon'", "known by name"),
        ("split = ['a']\nmicrobatches = 0", "one microbatch or more"),
        ("microbatches = 2", "no split"),
        ("way = [0, 1]", "no split"),
        ("split = ['a']\nway = [0, 1, 1]", "2 chunks"),
        ("split = ['a', 'b', 'c']\nway = [0, 2, 2, 0]", "each stage needs a chunk"),
        ("split = ['a', 'b', 'c']\nway = [0, -1, 1, 0]", "each stage needs a chunk"),
        ("split = ['a', 'b']\nway = ['first', 'last', 'first']", "the stage of each chunk"),
        ("split = ['a', 'b', 'c']\nway = [0, 1, 2, 0]", "3 stages, along pp"),
    ],
)
def test_invalid_stages_are_refused(line: str, said: str) -> None:
    with pytest.raises(SearchError, match=said):
        parse_mesh_plan(f"{line}\n[mesh]\npp = 2\ndp = 2")


class Products(nn.Module):
    """Two layers, a product each."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def frontier(problem: ShardingProblem) -> Iterator[Shardings]:
    """Yield the combinations of choices that no other one beats in both time and memory."""
    every = tuple(range(len(problem.sizes)))
    seconds, nbytes = (
        np.ravel(sum((aligned(table, every) for table in some), np.zeros(problem.sizes)))
        for some in (problem.tables, problem.held)
    )
    order = np.lexsort((nbytes, seconds))
    least = np.minimum.accumulate(nbytes[order])
    for n in order[np.concatenate([[True], nbytes[order][1:] < least[:-1]])]:
        chosen = np.unravel_index(n, problem.sizes)
        options = {node: ways[chosen[at]] for at, (node, ways) in enumerate(problem.options.items())}
        forms = {v: each[chosen[problem.number[v]]] for v, each in problem.forms.items()}
        yield problem.with_conversions(Shardings(float(seconds[n]), float(nbytes[n]), problem.facts, options, forms))


def test_shardings_of_stages_take_the_least_memory_if_needed() -> None:
    with torch.device("meta"):
        program = captured(Products(998), torch.empty(2056, 998))
    asked = PlanRequest(program, machines("4xA100", 1e9), True, (), 2.0)
    own = Replicas(asked, 2, 2)
    links = LinkTimes(lambda n: asked.cluster.message(n, False) * (n > 0), lambda n: 0.0 * n)
    staged: list[tuple[LayerCosts, int]] = []
    for pieces in asked.pieces(2):
        saving = MemorySaving(accumulate=pieces)
        problem, prices = own.problem(saving), replace(own.prices, replicas=1, saving=saving)
        chain, every = chain_of(program, problem.facts.trains), frontier(problem.holding(replace(prices, alive=2.0)))
        staged += [(layer_costs(cuts, prices, chain), 2 * pieces) for cuts in every]
    forms, beside = set[str](), list[float]()
    for memory in (11e6, 11.5e6, 12e6, 13e6, 14e6, 16e6, 20e6, 26e6, 40e6):
        asked = PlanRequest(program, machines("4xA100", memory), True, (), 2.0)
        found = Pipelines([own := Replicas(asked, 2, 2)], 2).best([own])
        fitting = (balance(layers, 2, count, asked.memory_limit, links) for layers, count in staged)
        best = min((one.seconds for one in fitting if one is not None), default=inf)
        assert (found is None) == (best == inf)
        if found is not None:
            assert found.nbytes <= asked.memory_limit
            beside.append(found.seconds / best)
            forms.add(repr([found.cuts.of(i.value) for i in program.inputs if i.role == "parameter"]))
    assert len(forms) > 1
    # if the fastest shardings fit under a slower table, no smaller ones for a faster table are searched
    assert [ratio for ratio in beside if ratio > 1.006] == [pytest.approx(1.014, abs=0.001)]


def test_a_plan_that_needs_stages_and_sharded_weights_is_found() -> None:
    with torch.device("meta"):
        program = captured(Blocks(2, 998), torch.empty(1024, 998))
    small, large = machines("4xA100", 14e6), machines("4xA100", 80e6)
    with pytest.raises(SearchError):
        plan_mesh(program, small, 4, stages=1)
    fast = next(plan for plan in plan_mesh(program, large, 4, stages=2) if plan.tp == 2)
    assert not any(spec.layout.cut_axes for name, spec in fast.layouts.items() if "weight" in name)
    assert fast.nbytes > 0.94 * 14e6
    (plan,) = plan_mesh(program, small, 4)
    assert plan.mesh.sizes == {"pp": 2, "dp": 1, "tp": 2}
    assert all("tp" in spec.layout.cut_axes for name, spec in plan.layouts.items() if "weight" in name)
    assert plan.nbytes <= 0.94 * 14e6
