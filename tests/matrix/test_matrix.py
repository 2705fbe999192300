"""Models that others wrote give the numbers of one device: a few cells of the matrix, and how a cell is judged."""

from __future__ import annotations

import pytest
import torch

from benchmarks.matrix import FLOOR, STEPS, Outcome, difference, measured

CELLS = [("dp×tp", "eager"), ("tp", "static")]


@pytest.mark.parametrize("model", ["GPT-2", "Bloom", "ViT", "Qwen3-MoE"])
def test_a_model_that_others_wrote_has_the_numbers_of_one_device(model: str) -> None:
    pytest.importorskip("transformers")
    found = dict(measured(model, CELLS, patience=100))
    assert {cell: f.verdict for cell, f in found.items()} == dict.fromkeys(CELLS, "ok"), found


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


def test_what_is_not_a_number_is_wrong() -> None:
    assert difference(outcome(a=[float("nan")]), outcome(a=[1.0]))[0] == float("inf")
