"""A simulated rank that uses a distributed tensor of another rank gets an error: ranks share caches and modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.tensor import PickleError, SimulatedRankError

MESH = mw.ProcessMesh([0, 1], ["a"])
CACHE: dict[Any, Any] = {}
RESULTS: list[Any] = []
PLACEMENTS = [mw.Shard(0), mw.Partial(), mw.Replicate()]


class Table:
    """An object of the program that computes its table once."""

    values: Tensor | None = None

    def get(self, make: Callable[[], Tensor]) -> Tensor:
        if self.values is None:
            self.values = make()
        return self.values


TABLE = Table()


@lru_cache
def cached(placement: mw.Placement) -> Tensor:
    return mw.shard_tensor(torch.arange(5.0), MESH, [placement])


@cache
def computed(placement: mw.Placement) -> Tensor:
    return mw.shard_tensor(torch.arange(5.0), MESH, [placement]) * 3


def in_a_dict(placement: mw.Placement) -> Tensor:
    if "mask" not in CACHE:
        CACHE["mask"] = mw.shard_tensor(torch.ones(5), MESH, [placement]) * 2
    return CACHE["mask"]


def in_an_object(placement: mw.Placement) -> Tensor:
    return TABLE.get(lambda: mw.shard_tensor(torch.ones(5), MESH, [placement]) * 3)


@pytest.fixture(autouse=True)
def _without_caches() -> None:
    CACHE.clear()
    cached.cache_clear()
    computed.cache_clear()
    TABLE.values = None


@pytest.mark.parametrize("use", [in_a_dict, in_an_object, cached, computed])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_cached_tensor_of_another_rank_is_refused(placement: mw.Placement, use: Any) -> None:
    mw.simulate(lambda: mw.shard_tensor(torch.ones(5), MESH, [placement]).add(1).sum().item(), 2)  # plans are known
    with pytest.raises(SimulatedRankError, match=r"made by rank 0, used by rank 1(.|\n)*fix: "):
        mw.simulate(lambda: use(placement).add(1).sum().item(), 2)


@pytest.mark.parametrize("shard", [True, False])
def test_a_global_model_that_each_rank_shards_is_refused(shard: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def rows(name: str, layer: nn.Module, mesh: mw.ProcessMesh) -> None:
        if isinstance(layer, nn.Linear):
            layer.weight = mw.shard_tensor(layer.weight, mesh, [mw.Shard(0)])

    with pytest.raises(SimulatedRankError, match="fix: "):
        mw.simulate(lambda: mw.shard_layer(model, MESH, rows if shard else None)(torch.ones(2, 4)).sum(), 2)


def test_a_cache_by_rank_is_right() -> None:
    def program() -> float:
        key = mw.get_rank()
        if key not in CACHE:
            CACHE[key] = mw.shard_tensor(torch.arange(5.0), MESH, [mw.Shard(0)])
        return [CACHE[key].sum().item() for _ in range(3)][-1]

    assert mw.simulate(program, 2) == [10.0, 10.0]


def test_results_of_ranks_are_collected() -> None:
    def program() -> Tensor:
        x = mw.shard_tensor(torch.arange(4.0), MESH, [mw.Shard(0)])
        RESULTS.append(x)
        x.sum().item()
        return x * 2

    found = mw.simulate(program, 2)
    assert [type(x) is mw.DistTensor for x in (*RESULTS, *found)] == [True] * 4
    assert [x.to_local().tolist() for x in RESULTS] == [[0.0, 1.0], [2.0, 3.0]]
    assert [x.to_local().tolist() for x in found] == [[0.0, 2.0], [4.0, 6.0]]
    RESULTS.clear()


def test_tensors_can_be_printed_after_an_error() -> None:
    def program() -> None:
        RESULTS.append(mw.shard_tensor(torch.arange(4.0), MESH, [mw.Shard(0)]))
        if mw.get_rank() == 1:
            raise ValueError("stop")
        RESULTS[-1].sum().item()

    with pytest.raises(ValueError, match="stop"):
        mw.simulate(program, 2)
    assert all(type(x) is mw.DistTensor for x in RESULTS)
    RESULTS.clear()


def test_errors_are_attributes_of_the_package() -> None:
    assert mw.PickleError is mw.errors.PickleError is PickleError
    with pytest.raises(mw.PickleError):
        mw.simulate(lambda: mw.shard_tensor(torch.ones(2), MESH, [mw.Shard(0)]).__reduce_ex__(2), 2)
    assert not hasattr(mw, "NoSuchError")
