"""Mesh plans as text: found plans are written, read back and edited; invalid plans are refused."""

from __future__ import annotations

import gc
import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshwright.cost import cluster
from meshwright.graph import capture
from meshwright.layout import LayoutError, MeshwrightError
from meshwright.search import MemorySaving, MeshPlan, Plan, SearchError, parse_mesh_plan, parse_plan, plan_mesh
from meshwright.search.module_plans.replicas import Replicas
from meshwright.search.sharding import program_facts

TEXT = """
[mesh]
dp = 2
tp = 2
[layouts]
"0.weight" = "f32[32@tp, 8]"
batch_0 = "f32[16@dp, 8]"
"""


class Odd(nn.Module):
    """A model with names of parameters that are not identifiers."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(8, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters():
            x = x @ parameter
        return x.sum()


def found(model: nn.Module, batch: list[torch.Tensor], ranks: int = 4) -> tuple[MeshPlan, ...]:
    return plan_mesh(capture(model, model, batch).program, cluster(f"{ranks}xA100"), ranks)


@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters=".\0"), min_size=1), min_size=1, max_size=3, unique=True
    )
)
def test_a_plan_that_was_found_is_read_back(names: list[str]) -> None:
    names = [name for name in names if not hasattr(nn.Module(), name)]
    for plan in found(Odd(names or ["w"]), [torch.ones(8, 8)]):
        again = parse_mesh_plan(plan.text())
        assert again == plan
        assert again.text() == plan.text()


@given(st.builds(Plan, dp=st.integers(1, 9), schedule=st.text(), precision=st.text(st.characters(codec="utf-8"))))
def test_a_plan_by_sizes_is_read_back(plan: Plan) -> None:
    try:
        plan.schedule.encode()
    except UnicodeEncodeError:
        return
    assert parse_plan(plan.text()) == plan
    assert parse_plan(json.dumps(asdict(plan))) == plan


@given(st.integers(0, 3), st.lists(st.text(st.characters(codec="utf-8"))), st.integers(1, 64))
def test_memory_saving_options_are_read_back(zero: int, layers: list[str], pieces: int) -> None:
    plan = replace(parse_mesh_plan(TEXT), saving=MemorySaving(zero, tuple(layers), pieces))
    assert parse_mesh_plan(plan.text()) == plan


def test_json_equals_toml() -> None:
    layouts = {"0.weight": "f32[32@tp, 8]", "batch_0": "f32[16@dp, 8]"}
    assert parse_mesh_plan(json.dumps({"mesh": {"dp": 2, "tp": 2}, "layouts": layouts})) == parse_mesh_plan(TEXT)


def test_errors_of_a_plan_by_sizes_suggest_the_nearest_word() -> None:
    with pytest.raises(SearchError, match=r"the closest is schedule"):
        parse_plan('schedul = "1F1B"')


def test_axes_may_have_any_names() -> None:
    plan = parse_mesh_plan('[mesh]\nrows = 2\ncolumns = 3\n[layouts]\nw = "f32[6@columns@rows, 4]"')
    assert plan.how == "rows 2 x columns 3"
    assert plan.mesh.size == 6
    assert (plan.dp, plan.tp) == (1, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mesh", "neither TOML nor JSON"),
        ("{", "neither TOML nor JSON"),
        ("layouts = {}", "mesh = None"),
        ("[mesh]", "a mesh has 1 to 16 axes"),
        ("[mesh]\ndp = 0", "a mesh has 1 to 16 axes"),
        ("[mesh]\ndp = 1000000000000", "a mesh has 1 to 16 axes"),
        ("[mesh]\ndp = true", "mesh = {'dp': True}"),
        ('[mesh]\n"d p" = 2', "identifier"),
        ("[mesh]\ndp = 2\n[layout]\nx = 'f32[4]'", "the closest is layouts"),
        ("[mesh]\ndp = 2\n[layouts]\nx = 4", "strings such as"),
        ("seconds = 'soon'\n[mesh]\ndp = 2", "predictions must be numbers"),
        ("[mesh]\ndp = 2\n[layouts]\nx = 'f32[4] +dp'", "only shard or replicate"),
        ("zero = 4\n[mesh]\ndp = 2", "stages of ZeRO"),
        ("zero = true\n[mesh]\ndp = 2", "stages of ZeRO"),
        ("recompute = 'blocks.*'\n[mesh]\ndp = 2", "names of layers"),
        ("context = 'soon'\n[mesh]\ndp = 2", "gather, ring, ulysses"),
        ("accumulate = 0\n[mesh]\ndp = 2", "one piece or more"),
    ],
)
def test_invalid_plans_are_refused(text: str, said: str) -> None:
    with pytest.raises(SearchError) as caught:
        parse_mesh_plan(text)
    assert said in str(caught.value)


def test_an_impossible_layout_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"the layout of 0\.weight"):
        parse_mesh_plan(TEXT.replace("32@tp", "32@pp"))


@pytest.mark.parametrize(
    ("old", "new", "write"),
    [
        ("0.weight", "0.wieght", "fix:   write 0.weight"),
        ("batch_0", "batch", "fix:   write batch_0"),
        ("f32[32@tp, 8]", "f32[8, 32@tp]", "f32[32, 8]"),
        ("f32[16@dp, 8]", "i64[16@dp, 8]", "f32[16, 8]"),
    ],
)
def test_a_plan_for_another_model_is_refused_by_name(old: str, new: str, write: str) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    program = capture(model, model, [torch.ones(16, 8)]).program
    assert {*parse_mesh_plan(TEXT).specs(program)} == {"0_weight", "batch_0"}
    with pytest.raises(MeshwrightError) as caught:
        parse_mesh_plan(TEXT.replace(old, new)).specs(program)
    assert write in str(caught.value)


def test_a_parameter_with_the_name_of_an_input_is_another_tensor() -> None:
    model, batch = Odd(["batch_0"]), [torch.ones(8, 8)]
    plan = found(model, batch)[0]
    assert len(plan.layouts) == len(plan.specs(capture(model, model, batch).program)) == 2


def test_equal_layers_are_analysed_once() -> None:
    """The number of calls that are looked up does not depend on the number of layers."""
    counts = list[int]()
    for depth in (3, 9):
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(depth)))
        with mock.patch.object(program_facts, "call_of", wraps=program_facts.call_of) as looked_up:
            found(model, [torch.empty(8, 64, device="meta")])
        counts.append(looked_up.call_count)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("memory", [80e9, 1e3])
def test_no_cycles_are_collected_during_a_search(memory: float) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
        program = capture(model, lambda x: model(x).sum(), [torch.empty(8, 64)]).program
    machines = cluster("4xA100")
    machines = replace(machines, device=replace(machines.device, memory=memory))
    before = sum(row["collections"] for row in gc.get_stats())
    with nullcontext() if memory > 1e9 else pytest.raises(SearchError):
        plan_mesh(program, machines, 4)
    assert sum(row["collections"] for row in gc.get_stats()) <= before + 1  # one may start when the search has ended
    assert gc.isenabled()


def test_the_memory_that_is_missing_is_only_computed_if_no_plan_fits() -> None:
    """Replicas of one rank do not fit, and larger ones do: no error text is needed."""
    with torch.device("meta"):
        model = nn.Linear(8192, 8192, bias=False)
        program = capture(model, lambda x: model(x).sum(), [torch.empty(4, 8192)]).program
    small = replace(cluster("4xA100"), device=replace(cluster("4xA100").device, memory=0.5e9))
    with mock.patch.object(Replicas, "nothing", side_effect=AssertionError):
        assert [plan.dp for plan in plan_mesh(program, small, 4)] == [1, 2]
