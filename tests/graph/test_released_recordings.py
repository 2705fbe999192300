"""Records of a model end with the model: symbolic sizes, programs, and the simulation itself."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright.comm import SimulatedCommunicator, current_communicator
from meshwright.engine.recording.shared_recordings import MOST_KEPT
from meshwright.graph.torch_hooks import ShapeEnv


def computed() -> int:
    """Return the number of results that torch caches in all living ShapeEnvs."""
    gc.collect()
    return sum(len(x.fake_tensor_cache) for x in gc.get_objects() if type(x) is ShapeEnv)


def trained(mesh: mw.ProcessMesh) -> None:
    """Train a model with two sizes; the second one makes a program with variable sizes."""
    net = mw.shard_layer(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1)), mesh)
    step = mw.to_static(net, loss=F.mse_loss, optimizer=torch.optim.AdamW(net.parameters()))
    for rows in (4, 6, 8):
        x, y = (mw.shard_tensor(torch.ones(rows, n), mesh, [mw.Shard(0)]) for n in (4, 1))
        step(x, y)
    assert step.recordings <= 3


def test_recordings_of_deleted_models_are_released() -> None:
    counts: list[int] = []

    def body() -> None:
        mesh = mw.ProcessMesh([0], ["dp"])
        for _ in range(3):  # a leak would make the last count three times the first
            trained(mesh)
            counts.append(computed())

    mw.simulate(body, 1)
    assert max(counts) <= 2 * counts[0], counts


def test_a_simulation_is_released_when_it_ends() -> None:
    worlds: list[Any] = []

    def body() -> None:
        trained(mw.ProcessMesh([0, 1], ["dp"]))
        here = current_communicator()
        assert isinstance(here, SimulatedCommunicator)
        worlds.append(weakref.ref(here._world))  # pyright: ignore[reportPrivateUsage] - nothing else lives as long

    mw.simulate(body, 2)
    gc.collect()
    assert [world() for world in worlds] == [None, None]


def test_caches_shared_by_ranks_are_bounded() -> None:
    def body() -> tuple[int, int]:
        mesh = mw.ProcessMesh([0, 1], ["dp"])
        for _ in range(3):
            trained(mesh)
        here = current_communicator()
        assert isinstance(here, SimulatedCommunicator)
        return len(here.shared), len(here.shared["made once"])

    entries = mw.simulate(body, 2)
    assert all(kept <= MOST_KEPT for _, kept in entries)
