"""Training on simulated ranks with tensors on the devices: the bits and the collectives of the same ranks on a CPU."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import meshwright as mw
from tests.device.communicator import run_on_devices
from tests.device.inspection import Devices
from tests.device.training import KINDS, train
from tests.device.waits import leaving_out

RANKS = 4


def _compare(found: list[Any], expected: list[Any]) -> None:
    for (ours, our_calls), (theirs, their_calls) in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
        assert our_calls == their_calls


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_and_calls_are_those_on_the_cpu(mesh_device: Devices, kind: str, static: bool) -> None:
    """Each rank is on a device of its own, with queued collectives."""
    expected = mw.simulate(lambda: train(kind, static, "cpu"), RANKS)
    _compare(mw.simulate(run_on_devices(lambda device: train(kind, static, device)), RANKS), expected)


def test_ranks_may_share_a_device(mesh_device: Devices) -> None:
    expected = mw.simulate(lambda: train("dp x tp", False, "cpu"), RANKS)
    _compare(mw.simulate(lambda: train("dp x tp", False, "mesh:0"), RANKS), expected)


@pytest.mark.parametrize("wait", ["operands of *", "results of *"])
@pytest.mark.parametrize("kind", ["dp", "tp", "ZeRO-3"])
def test_a_missing_wait_is_found(mesh_device: Devices, kind: str, wait: str) -> None:
    """Collectives start before their inputs are there, or their results are used before they are there."""
    with leaving_out(wait):
        mw.simulate(run_on_devices(lambda device: train(kind, False, device)), RANKS)
        gc.collect()  # frees what the wait protected
    assert mesh_device.take_races()


def test_generators_are_kept_per_rank(mesh_device: Devices) -> None:
    expected = mw.simulate(lambda: train("tp", False, "cpu", dropout=0.3), RANKS)
    _compare(mw.simulate(lambda: train("tp", False, "mesh:0", dropout=0.3), RANKS), expected)


def test_autocast_of_the_caller_is_inherited(mesh_device: Devices) -> None:
    with torch.autocast("mesh", dtype=torch.bfloat16):
        assert mw.simulate(lambda: torch.is_autocast_enabled("mesh"), 2) == [True, True]


@pytest.mark.parametrize("on", ["mesh:0", "cpu"])
def test_an_index_may_be_on_the_cpu(mesh_device: Devices, on: str) -> None:
    """A list becomes an index on the CPU too."""

    def program() -> list[list[float]]:
        x = mw.shard_tensor(torch.arange(12.0, device="mesh:0").view(4, 3), pair, [mw.Shard(0)])
        index = torch.tensor([0, -1], device=on)
        assert torch.equal(mw.unshard_dtensor(x[[0, -1]]), mw.unshard_dtensor(x[index]))
        return mw.unshard_dtensor(x[index]).tolist()

    pair = mw.ProcessMesh([0, 1], ["x"])
    assert mw.simulate(program, 2) == [[[0, 1, 2], [9, 10, 11]]] * 2
