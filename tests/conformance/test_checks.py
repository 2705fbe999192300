"""The tables of checks: names, numbers, and some checks of each level in this process."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.comm import simulate
from meshwright.conformance import CHECKS, LEVELS, Check, NotRun, Target, WrongResult
from meshwright.conformance.checks import device, operators, simulated, speed, training_programs, transport
from meshwright.conformance.checks.comparison import expect_close, expect_equal
from meshwright.spmd.rules.rule_table import RULES

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FEWEST = {0: 40, 1: 500, 2: 150, 3: 120, 4: 110, 5: 8}


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return Target(torch.device("cpu"), 1, FLOATING, tmp_path)


def run(check: Check, target: Target) -> None:
    if check.processes == 1:
        check.run(target)
    else:
        simulate(lambda: check.run(target), check.processes)


def test_names_are_unique_and_levels_are_complete() -> None:
    assert len({check.key for check in CHECKS}) == len(CHECKS)
    assert {level: len(checks) >= FEWEST[level] for level, checks in LEVELS.items()} == dict.fromkeys(range(6), True)
    assert all(check.level == level for level, checks in LEVELS.items() for check in checks)


def test_every_operator_with_a_rule_is_checked() -> None:
    names = {check.name for check in LEVELS[1]}
    asked = {name.split(".")[1] for name in RULES if name.startswith("aten.")}
    assert asked - names <= operators.GONE


CHOSEN = (
    *(
        "L0 copy of bfloat16",
        "L0 copies of views",
        "L0 equal draws of dropout",
        "L0 equal bits of repeated work: softmax",
    ),
    *("L1 mm", "L1 layer_norm", "L1 sort", "L1 linalg_svd", "L1 empty_like", "L1 _scaled_mm"),
    *("L2 conversion from rows to columns", "L2 calls: attention", "L2 index: a list", "L2 backward pass of dropout"),
    *('L2 sharded draws by "torch": dropout', "L2 ranks: different calls"),
    *("L3 reduction by sum of complex64", "L3 messages of float32", "L3 exchange", "L3 conversions in flight"),
    *("L3 four processes: exchange", "L3 four processes: conversions in flight", "L3 four processes: NaN"),
    *("L4 four processes: context parallel by ring, eager", "L4 four processes: pipeline 1F1B, static"),
    *("L4 simulated: tensor parallel, eager", "L4 simulated: ZeRO-3, static", "L4 simulated: pipeline 1F1B, static"),
    *("L4 simulated: resume ZeRO-1, eager", "L4 two processes: data parallel, eager", "L5 memory bandwidth"),
)


@pytest.mark.parametrize("key", CHOSEN)
def test_a_check_passes_on_the_cpu(key: str, target: Target) -> None:
    (check,) = (each for each in CHECKS if each.key == key)
    run(check, target)


def test_checks_that_need_an_accelerator_say_so(target: Target) -> None:
    for name in ("order of streams", "memory statistics", "copies between devices"):
        (check,) = (each for each in LEVELS[0] if each.name == name)
        with pytest.raises(NotRun, match=r"no streams|counts no memory|needs 2 devices"):
            check.run(target)


def test_speeds_of_a_known_device_are_shares_of_the_table(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SECONDS", 0.001)
    assert "%" not in speed.memory_bandwidth(target) + speed.products(torch.float32, target)
    assert "%" not in simulate(lambda: speed.all_reduce(target), 2)[0]
    monkeypatch.setattr(speed, "device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert re.search(r"GB/s, copies of 16 MiB: \d+ % of the bandwidth in the table$", speed.memory_bandwidth(target))
    assert re.search(r"TFLOP/s, .*: \d+ % of the peak in the table$", speed.products(torch.float32, target))
    assert simulate(lambda: speed.all_reduce(target), 2)[0].endswith("% of the bandwidth of NVLink4 in the table")
    through_host = replace(target, through_host=True)
    assert "%" not in simulate(lambda: speed.all_reduce(through_host), 2)[0]


def test_overlap_is_a_share(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "TIMES", 2)
    found = simulate(lambda: speed.overlap(target), 2)[0]
    assert 0 <= int(found.partition(" % of the shorter part is hidden")[0]) <= 100


# ---- defects are found ----


@pytest.mark.parametrize(
    "broken",
    [lambda x: x.bfloat16().double(), lambda x: x[:1], lambda x: x.float(), lambda x: x * float("nan")],
    ids=["rounded", "other shape", "other dtype", "NaN"],
)
def test_wrong_results_of_an_operator_are_found(
    broken: Callable[[Tensor], Tensor], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call for each sample is that of the device."""
    right, calls = operators._results, []

    def wrong(*given: Any) -> list[Tensor]:
        calls.append(given)
        found = right(*given)
        return found if len(calls) % 2 else [broken(x) for x in found]

    (mm,) = (each for each in LEVELS[1] if each.name == "mm")
    monkeypatch.setattr(operators, "_results", wrong)
    with pytest.raises(WrongResult, match="mm"):
        mm.run(replace(target, dtypes=(torch.float64,)))


def test_wrong_collectives_are_found(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transport.FOLDS, "sum", lambda x: x.sum(0, dtype=x.dtype) + 1)
    with pytest.raises(WrongResult, match="all-reduce"):
        simulate(transport.reduction, 2, "sum", torch.float32, target)


def test_a_generator_that_does_not_advance_is_found(target: Target) -> None:
    with pytest.raises(WrongResult, match="two draws"):
        device.equal_draws(lambda d: torch.ones(3, device=d), target)


def test_programs_that_depend_on_the_rank_are_found(target: Target) -> None:
    with pytest.raises(WrongResult, match=r"rank \d of 2"):
        simulated.same_as_one_device(lambda x, y, w, v, i: x * (type(x) is not Tensor), target)


def test_other_training_is_found(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_programs.ShardingStage1, "__init__", lambda self, *args, **kwargs: 1 / 0)
    (check,) = (each for each in LEVELS[4] if each.name == "simulated: ZeRO-1, eager")
    with pytest.raises(ZeroDivisionError):
        check.run(target)


@pytest.mark.parametrize(
    ("found", "expected", "is_close"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.00001], [1.0, 2.0], True),
        ([1.0, 2.001], [1.0, 2.0], False),
        ([float("nan"), 2.0], [float("nan"), 2.0], True),
        ([1.0, 2.0], [float("nan"), 2.0], False),
        ([float("nan"), 2.0], [1.0, 2.0], False),
        ([float("inf")], [-float("inf")], False),
    ],
)
def test_comparison_by_relative_error(found: list[float], expected: list[float], is_close: bool) -> None:
    try:
        expect_close(torch.tensor(found), torch.tensor(expected), "numbers")
    except WrongResult:
        assert not is_close
    else:
        assert is_close


def test_comparison_of_bits() -> None:
    expect_equal(torch.tensor([float("nan"), -0.0]), torch.tensor([float("nan"), -0.0]), "bits")
    for other in (torch.tensor([1.0, 3.0]), torch.tensor([1.0]), torch.tensor([1, 2])):
        with pytest.raises(WrongResult, match="instead of"):
            expect_equal(other, torch.tensor([1.0, 2.0]), "bits")
