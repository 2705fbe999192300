"""Library models give the numbers of one device: a few cells of the matrix, and how a cell is judged."""

from __future__ import annotations

import pytest
import torch

from benchmarks._matrix_models import MODELS
from benchmarks._matrix_settings import SETTINGS
from benchmarks.matrix import FLOOR, STEPS, Outcome, check, difference, figure_of, measured, on_one_device

CELLS = [("dp×tp", "eager"), ("tp", "static")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["GPT-2", "Qwen3-MoE"])
def test_a_library_model_has_the_numbers_of_one_device(model: str) -> None:
    pytest.importorskip("transformers")
    subject = MODELS[model]
    wanted, close = on_one_device(subject)
    found = {cell: check(subject, wanted, close, cell) for cell in CELLS}
    assert {cell: f.verdict for cell, f in found.items()} == dict.fromkeys(CELLS, "ok"), found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["RWKV", "Longformer"])
def test_calls_of_stages_are_those_of_processes(model: str) -> None:
    """RWKV writes to slices of a tensor, and Longformer reads the strides of views."""
    pytest.importorskip("transformers")
    subject = MODELS[model]
    wanted, close = on_one_device(subject)
    assert check(subject, wanted, close, ("pp", "eager")).verdict == "ok"


def test_the_cells_of_a_model_run_in_a_process_of_their_own() -> None:
    pytest.importorskip("transformers")
    found = dict(measured("GPT-2", CELLS[:1], patience=100))
    assert [f.verdict for f in found.values()] == ["ok"], found


def outcome(**gradients: list[float]) -> Outcome:
    found = {name: torch.tensor(g) for name, g in gradients.items()}
    return Outcome(torch.ones(STEPS), (found,) * STEPS)


def test_each_gradient_counts_by_its_own_norm() -> None:
    worst, where = difference(outcome(a=[100.0, 0.0], b=[1.0, 0.01]), outcome(a=[100.0, 0.0], b=[1.0, 0.0]))
    assert where.endswith("of b")
    assert worst == pytest.approx(0.01)


def test_a_gradient_of_roundings_counts_by_the_norm_of_all() -> None:
    worst, _ = difference(outcome(a=[100.0], b=[2e-9]), outcome(a=[100.0], b=[1e-9]))
    assert worst == pytest.approx(1e-9 / (FLOOR * 100))


def test_a_missing_gradient_is_zero() -> None:
    assert difference(outcome(a=[1.0], b=[0.0]), outcome(a=[1.0]))[0] == 0
    assert difference(outcome(), outcome(a=[1.0]))[0] == 1


def test_nan_is_wrong() -> None:
    assert difference(outcome(a=[float("nan")]), outcome(a=[1.0]))[0] == float("inf")


def test_the_table_of_several_runs_is_in_order() -> None:
    ok, bug = {"verdict": "ok", "seconds": 1.0}, {"verdict": "bug", "seconds": 2.0}
    figure = figure_of({"ViT": {"tp static": bug, "dp eager": ok}, "Llama": {"dp eager": ok}})
    details = figure["details"]
    assert (figure["value"], figure["ok"], details["seconds"]) == (1, False, 4)
    assert [*details["table"]] == ["Llama", "ViT"]
    assert [*details["table"]["ViT"]] == ["dp eager", "tp static"]


class Weights(torch.nn.Module):
    """A module that is not torch's."""


@pytest.mark.parametrize(
    ("setting", "shape", "experts", "unfit"),
    [
        ("cp", (8, 4), 0, False),
        ("cp", (8, 3, 4, 4), 0, True),
        ("ep", (8, 4), 4, False),
        ("ep", (8, 4), 0, True),
        ("pp", (8, 4), 0, True),
        ("tp", (8, 4), 0, False),
    ],
)
def test_a_setting_refuses_unfit_models(setting: str, shape: tuple[int, ...], experts: int, unfit: bool) -> None:
    model = Weights()
    model.register_parameter("weight", torch.nn.Parameter(torch.ones(experts or 1, 4, 4)))
    assert bool(SETTINGS[setting].unfit(model, [torch.ones(shape)])) is unfit
