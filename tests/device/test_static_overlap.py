"""Static steps whose collectives run beside their operators: bits, virtual time against the schedule, and waits."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from benchmarks._left_out_waits import RANKS, left_out_waits
from benchmarks._race_programs import COMPILED, OVERLAPPED, RELEASED, Case, Options
from benchmarks._virtual_steps import Chain, Machine
from benchmarks.overlap import CASES, overlapped
from meshwright.graph import Pass
from meshwright.passes import InPlace, OverlapSchedule
from tests.device.backend import register_kernels
from tests.device.communicator import run_on_devices
from tests.device.inspection import Devices
from tests.device.training import train
from tests.device.waits import recording_waits

CHAIN = Chain(layers=4)
OWN = OverlapSchedule(memory=0)


@pytest.mark.parametrize("name", ["dp", "ZeRO-3"])
def test_the_predicted_seconds_are_hidden(mesh_device: Devices, name: str) -> None:
    found = overlapped(mesh_device, Machine(), CHAIN, CASES[name])
    assert found.without.losses == found.overlapped.losses
    assert found.share >= 0.9, found.details
    assert found.slowdown <= 1.2, found.details


@pytest.mark.parametrize("options", [OVERLAPPED, COMPILED], ids=["node by node", "kernels"])
def test_bits_are_those_on_the_cpu(mesh_device: Devices, options: Options) -> None:
    register_kernels()
    case = Case("dp" if options is COMPILED else "ZeRO-3", True, options)
    ranks = 2 if options is COMPILED else RANKS  # Inductor takes seconds for each rank
    for ours, theirs in zip(
        case.run(on_devices=True, ranks=ranks), case.run(on_devices=False, ranks=ranks), strict=True
    ):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("options", [RELEASED, COMPILED], ids=["node by node", "kernels"])
def test_a_step_without_one_of_its_waits_has_a_race(mesh_device: Devices, options: Options) -> None:
    register_kernels()
    waits = left_out_waits(mesh_device, Case("dp", True, options).training)
    assert {wait.where for wait in waits} == {f"{what} of a started all_reduce" for what in ("operands", "results")}
    assert all(wait.found or wait.covered for wait in waits)


@pytest.mark.parametrize(
    ("passes", "expected"),
    [((), [OverlapSchedule()]), ((OWN,), [OWN]), ((InPlace(),), [OverlapSchedule()])],
    ids=["none", "a schedule", "another pass"],
)
def test_programs_of_devices_overlap_unless_the_user_decides(
    mesh_device: Devices, passes: tuple[Pass, ...], expected: list[Pass]
) -> None:
    strategy = mw.Strategy(passes=passes)
    found = strategy.passes_on("recorded", torch.device("mesh:0"))
    assert [each for each in found if isinstance(each, OverlapSchedule)] == expected
    assert not any(isinstance(each, InPlace) for each in found[: found.index(expected[0])])
    assert not any(each in expected for each in strategy.passes_on("recorded") if each not in passes)


@pytest.mark.parametrize("passes", [(), (OWN,)], ids=["by default", "without memory"])
def test_a_static_step_starts_its_collectives_early(mesh_device: Devices, passes: tuple[Pass, ...]) -> None:
    with recording_waits() as names:
        mw.simulate(run_on_devices(lambda device: train("dp", True, device, strategy=mw.Strategy(passes=passes))), 2)
    assert ("results of a started all_reduce" in names) == (not passes)
