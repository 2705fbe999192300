"""The settings of published recipes belong to rows of their release and plan."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from benchmarks._megatron_recipes import RECIPES, SOURCE, recipe_of
from benchmarks._published import ROWS, is_usable, run_of, runs, source_of
from meshwright.search.transformer_plans.software import LayerPart, RepeatedPart


def row(release: str | None, **parallel: Any) -> dict[str, Any]:
    return {
        "model": {"name": "DeepSeek-V3"},
        "hardware": {"gpu": "GB200-NVL72"},
        "parallel": {"tp": 1, "pp": 4, "vpp": 4, "cp": 1, "ep": 64, **parallel},
        "train": {"release": release, "precision": "mxfp8", "micro_batch": 1, "global_batch": 4096},
    }


def test_a_row_has_the_settings_of_its_release() -> None:
    before, after = (recipe_of(row(release)).settings for release in ("26.04", "26.06"))
    assert not before.get("fused_experts")
    assert after["fused_experts"]
    assert after["overlaps_experts"]


def test_a_recipe_with_the_plan_of_a_row_comes_before_one_of_its_release() -> None:
    found = recipe_of({**row("26.04.01", pp=8, vpp=2, ep=32), "hardware": {"gpu": "B200-SXM-180GB"}}).settings
    assert (found["plan"]["pp"], found["plan"]["ep"]) == (8, 32)
    assert "26.04.01" not in found["releases"]


@pytest.mark.parametrize("model", ["Llama-4-Maverick", "deepseek v3"])
def test_a_model_is_found_by_its_letters(model: str) -> None:
    settings = recipe_of({**row("26.06"), "model": {"name": model}}).settings
    assert bool(settings) == ("deepseek" in model)


def test_settings_are_parts_that_the_prices_know() -> None:
    for recipe in json.loads(RECIPES.read_text())["recipes"]:
        assert set(recipe.get("graphs", ())) <= set(get_args(LayerPart))
        assert set(recipe.get("repeated", ())) <= set(get_args(RepeatedPart))


def test_all_rows_of_the_source_with_experts_have_a_recipe() -> None:
    rows = [r for r in json.loads(ROWS.read_text())["rows"] if is_usable(r) and source_of(r) == SOURCE]
    experts = [r for r in rows if r["model"]["kind"] == "moe"]
    assert experts
    assert all(recipe_of(r).settings for r in experts)


def test_rows_with_experts_are_predicted_well() -> None:
    """The mean error of rows with experts stays below 10 %."""
    from benchmarks._fit import Constants
    from benchmarks.predict import error

    found = [abs(error(r, Constants().seconds(r))) for r in runs() if r.seconds and r.model.experts]
    assert sum(found) / len(found) < 0.10


def test_a_row_says_whether_it_predicts_a_token_ahead() -> None:
    rows = {r["id"]: r for r in json.loads(ROWS.read_text())["rows"]}
    assert [run_of(rows[name]).model.ahead for name in ("r0181", "r0001", "r0002")] == [0, 1, 0]
