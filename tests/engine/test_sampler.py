"""Samples by global index: each once per epoch, however a run is stopped and resumed between two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import meshwright as mw
from meshwright.engine import BatchError
from meshwright.engine.training.sampler import permuted

MESH = mw.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
Legs = list[tuple[int, int, int]]
"""Runs one after the other: ranks, steps, batch."""


class Numbers(Dataset[tuple[torch.Tensor, int]]):
    """A data set whose sample i is (i, 2 i), and which records the indices that were read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        self.read.append(at)
        return torch.tensor([at]), 2 * at


@given(st.integers(1, 300), st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    at = np.arange(size, dtype=np.uint64)
    assert sorted(permuted(at, size, seed, epoch).tolist()) == list(range(size))


def test_a_permutation_is_well_mixed_and_costs_no_memory() -> None:
    size = 10**12
    found = permuted(np.arange(20000, dtype=np.uint64), size, 0, 0).astype(np.float64) / size
    assert abs(found.mean() - 1 / 2) < 0.01
    assert abs(np.abs(np.diff(found)).mean() - 1 / 3) < 0.01
    other = permuted(np.arange(20000, dtype=np.uint64), size, 0, 1).astype(np.float64) / size
    assert abs(np.corrcoef(found, other)[0, 1]) < 0.03


legs = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(1, 9)), max_size=5)


def epochs_of(length: int, legs: Legs, seed: int, split: bool) -> list[list[int]]:
    """Return the samples of each epoch, in order; the last leg runs to the end of an epoch."""
    epochs: dict[int, list[int]] = {}
    state: list[Any] = [None]

    def go(ranks: int, steps: int | None, batch: int) -> Any:
        mesh = mw.ProcessMesh(range(ranks), ["dp"])
        how: dict[str, Any] = {"mesh": mesh, "axis": "dp"} if split else {}
        sampler = mw.GlobalSampler(length, batch, seed=seed, **how)
        data = mw.shard_dataloader(DataLoader(Numbers(length), batch_sampler=sampler), mesh, "dp")
        if state[0] is not None:
            data.load_state_dict(state[0])
        found: list[tuple[int, list[int]]] = []
        while steps is None or len(found) < steps:
            for at, twice in data:
                epoch = sampler.place.epoch - (sampler.place.taken == 0)
                values = mw.unshard_dtensor(at).flatten().tolist()
                assert mw.unshard_dtensor(twice).tolist() == [2 * n for n in values]
                found.append((epoch, values))
                if len(found) == steps:
                    break
            if steps is None:
                break
        return found, data.state_dict()

    for ranks, steps, batch in [*legs, (2, None, 4)]:
        results = mw.simulate(go, ranks, ranks, steps, batch)
        assert all(result == results[0] for result in results)
        for epoch, values in results[0][0]:
            epochs.setdefault(epoch, []).extend(values)
        state[0] = results[0][1]
    return [epochs[epoch] for epoch in sorted(epochs)]


@given(st.integers(1, 40), legs, st.integers(0, 2), st.booleans())
def test_every_sample_is_seen_once_across_restarts(length: int, legs: Legs, seed: int, split: bool) -> None:
    """The order is also the same: it depends on the epoch, and batches are slices of it."""
    epochs = epochs_of(length, legs, seed, split)
    for epoch, seen in enumerate(epochs):
        plain = mw.GlobalSampler(length, length, seed=seed)
        plain.load_state_dict(plain.state_dict() | {"epoch": epoch})
        assert [seen] == list(plain)


def test_a_rank_reads_only_its_own_rows_or_one_if_it_has_none() -> None:
    def go() -> tuple[list[int], list[Any]]:
        numbers = Numbers(9)
        sampler = mw.GlobalSampler(numbers, 4, shuffle=False, mesh=mesh, axis="dp")
        data = mw.shard_dataloader(DataLoader(numbers, batch_sampler=sampler), mesh, "dp")
        assert len(data) == 3
        return numbers.read, [(repr(at.spec), tuple(at.to_local().shape)) for at, _ in data]

    mesh = mw.ProcessMesh(range(4), ["dp"])
    ranks = mw.simulate(go, 4)
    assert [read for read, _ in ranks] == [[0, 4, 8], [1, 5, 8], [2, 6, 8], [3, 7, 8]]
    assert [seen[-1] for _, seen in ranks] == [("i64[1@dp, 1]", (n, 1)) for n in (1, 0, 0, 0)]


def test_rows_along_two_axes_and_stages_of_a_pipeline() -> None:
    def go() -> tuple[Any, Any]:
        sampler = mw.GlobalSampler(8, 8, shuffle=False, mesh=MESH, axis=("dp", "tp"))
        ((x, _),) = mw.shard_dataloader(DataLoader(Numbers(8), batch_sampler=sampler), MESH, ("dp", "tp"))
        sampler = mw.GlobalSampler(8, 8, shuffle=False, mesh=MESH, axis="tp")
        stages = [MESH["dp", 0], MESH["dp", 1]]
        ((a, b),) = mw.shard_dataloader(DataLoader(Numbers(8), batch_sampler=sampler), stages, "tp")
        return [repr(x.spec), x.to_local().flatten().tolist()], [
            mw.unshard_dtensor(a).flatten().tolist(),
            mw.unshard_dtensor(b).tolist(),
            a.mesh,
            b.mesh,
        ]

    for rank, (cut, staged) in enumerate(mw.simulate(go, 4)):
        assert cut == ["i64[8@dp@tp, 1]", [2 * rank, 2 * rank + 1]]
        assert staged == [list(range(8)), list(range(0, 16, 2)), MESH["dp", 0], MESH["dp", 1]]


def test_a_data_set_may_take_many_indices_at_once() -> None:
    def go() -> list[Any]:
        sampler = mw.GlobalSampler(6, 4, shuffle=False, mesh=MESH, axis="dp")
        loader = DataLoader(TensorDataset(torch.arange(6)), sampler=sampler, batch_size=None)
        data = mw.shard_dataloader(loader, MESH, "dp")
        found = [(mw.unshard_dtensor(x).tolist(), x.to_local().tolist()) for (x,) in data]
        return [*found, data.state_dict()["epoch"]]

    last = [([0, 1, 2, 3], [2, 3]), ([4, 5], [5]), 1]
    assert mw.simulate(go, 4)[3] == last


def test_a_prefetching_loader_has_the_position_of_its_last_batch() -> None:
    sampler = mw.GlobalSampler(12, 2, seed=3)
    loader = DataLoader(Numbers(12), batch_sampler=sampler, num_workers=1, prefetch_factor=2)

    def go() -> Any:
        data = mw.shard_dataloader(loader, mw.ProcessMesh([0], ["dp"]))
        seen: list[int] = []
        before = torch.get_rng_state()
        for n in (2, 4):  # a loop that ends early, and one that resumes there
            for count, (at, _) in enumerate(data, 1):
                seen += at.flatten().tolist()
                assert data.state_dict()["taken"] == len(seen) % 12
                if count == n:
                    break
        assert torch.equal(before, torch.get_rng_state())
        return seen

    (seen,) = mw.simulate(go, 1)
    assert [seen] == list(mw.GlobalSampler(12, 12, seed=3))


def test_the_last_partial_batch_is_dropped_on_request() -> None:
    sampler = mw.GlobalSampler(10, 4, shuffle=False, drop_last=True)
    assert (len(sampler), list(sampler), sampler.place.epoch) == (2, [[0, 1, 2, 3], [4, 5, 6, 7]], 1)
    later = mw.GlobalSampler(10, 8, drop_last=True)
    later.load_state_dict(sampler.state_dict() | {"epoch": 0, "taken": 4})
    assert (later.place.epoch, later.place.taken, later.shuffle) == (1, 0, False)


class Stream(IterableDataset[int]):
    """A data set of parts that keeps its own position."""

    def __init__(self) -> None:
        self.at = mw.get_rank() // 2 * 100

    def __iter__(self) -> Any:
        while True:
            self.at += 1
            yield torch.tensor([self.at - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"at": (self.at,)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.at,) = state["at"]


def test_parts_with_positions_resume_with_as_many_parts(tmp_path: Path) -> None:
    def go(ranks: Any, steps: int) -> Any:
        mesh = mw.ProcessMesh(ranks, ["dp", "tp"])
        data = mw.shard_dataloader(Stream(), mesh, "dp", is_dataset_splitted=True)
        net = torch.nn.Linear(1, 1)
        if steps == 0:
            mw.load_checkpoint(tmp_path, net, data=data)
        seen = [mw.unshard_dtensor(x).tolist() for _, x in zip(range(3), data, strict=False)]
        if steps:
            mw.save_checkpoint(tmp_path, steps, net, data=data)
        return seen

    four, two = [[0, 1], [2, 3]], [[0], [1]]
    assert mw.simulate(lambda: go(four, 3), 4)[3] == [[0, 100], [1, 101], [2, 102]]
    assert mw.simulate(lambda: go(four, 0), 4)[3][0] == [3, 103]
    assert mw.simulate(lambda: go([[0, 2], [1, 3]], 0), 4)[0][0] == [3, 103]
    assert mw.simulate(lambda: go(two, 0), 2)[0][0] == [3, 103]
    with pytest.raises(BatchError, match="seen twice"):
        mw.simulate(lambda: go([[0], [1], [2]], 0), 3)


@pytest.mark.parametrize(
    ("axis", "dims", "split"), [(None, "dp", True), ("dp", "tp", False), ("dp", None, False), ("tp", "dp", True)]
)
def test_a_sampler_with_other_rows_is_refused(axis: Any, dims: Any, split: bool) -> None:
    def go() -> None:
        sampler = mw.GlobalSampler(8, 4, mesh=MESH, axis=axis)
        mw.shard_dataloader(DataLoader(Numbers(8), batch_sampler=sampler), MESH, dims, is_dataset_splitted=split)

    with pytest.raises(BatchError, match="that mesh and axis"):
        mw.simulate(go, 4)
