"""Conversion to torch's DTensor and back, on a process group without peers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshwright as mw
from meshwright.comm import PeerlessCommunicator, using_communicator
from meshwright.engine import TorchDTensorError
from meshwright.layout import parse_layout
from meshwright.tensor import redistribute

MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
R = mw.Replicate()


@pytest.fixture
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    with using_communicator(PeerlessCommunicator(rank=0, size=4)):
        yield
    dist.destroy_process_group()


PLACEMENTS = [
    [],
    [mw.Shard(0)],
    [mw.Shard(0), mw.Shard(1)],
    [mw.Shard(1), mw.Shard(1)],
    [mw.Partial(), mw.Shard(0)],
    [mw.Partial("max"), mw.Partial("max")],
    [R, mw.Partial("prod")],
]


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("placements", PLACEMENTS, ids=repr)
def test_a_round_trip_gives_the_same_tensor(placements: list[Any]) -> None:
    x = mw.shard_tensor(torch.arange(15.0).reshape(5, 3), MESH, placements)
    there = mw.to_torch_dtensor(x)
    assert there.shape == x.shape
    assert there.device_mesh.mesh_dim_names == ("dp", "tp")
    assert there.to_local().data_ptr() == x.to_local().data_ptr()
    back = mw.from_torch_dtensor(there)
    assert (back.spec, back.to_local().data_ptr()) == (x.spec, x.to_local().data_ptr())


@pytest.mark.usefixtures("four_ranks")
def test_gradients_pass() -> None:
    x = mw.shard_tensor(torch.ones(4, 6), MESH, [mw.Shard(0), mw.Shard(1)], requires_grad=True)
    (mw.from_torch_dtensor(mw.to_torch_dtensor(x) * 3) * 2).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.to_local(), torch.full((2, 3), 6.0))


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("text", ["[4@tp@dp, :]", "[2 * 2@tp, :]", "[:, :] +tp:any"])
def test_layouts_unknown_to_dtensor_are_refused(text: str) -> None:
    x = mw.shard_tensor(torch.ones(4, 6).bool(), MESH, [])
    x = redistribute(x, MESH, parse_layout(text))
    with pytest.raises(TorchDTensorError, match=r"fix:   call mw\.reshard"):
        mw.to_torch_dtensor(x)


@pytest.mark.usefixtures("four_ranks")
def test_varying_replication_becomes_replication() -> None:
    x = mw.shard_tensor(torch.ones(4, 6), MESH, [])
    x = redistribute(x, MESH, x.spec.layout.with_varying(["dp"]))
    assert mw.from_torch_dtensor(mw.to_torch_dtensor(x)).spec.layout.varying == ()


def test_simulated_ranks_have_no_process_groups() -> None:
    with pytest.raises(TorchDTensorError, match="unshard_dtensor"):
        mw.simulate(lambda: mw.to_torch_dtensor(mw.shard_tensor(torch.ones(4), MESH, [])), 4)
