"""Memory that the host cannot touch, that is NaN when it is new or free, and that is counted."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.device.inspection import Devices


def test_a_touch_by_the_host_is_an_error(mesh_device: Devices) -> None:
    x = torch.zeros(4, device="mesh:0")
    ctypes.string_at(x.data_ptr(), 4)
    with pytest.raises(RuntimeError, match="the host touched memory of mesh:0: 1 pages"):
        x + 1
    ctypes.memset(x.data_ptr(), 1, 4)
    assert mesh_device.take_host_touches() == 1
    x + 1


def test_new_memory_is_nan(mesh_device: Devices) -> None:
    assert torch.empty(5, device="mesh:0").isnan().all()
    assert torch.empty(5, device="mesh:0", dtype=torch.bfloat16).isnan().all()
    assert (torch.empty(5, device="mesh:0", dtype=torch.int64) == -1).all()


def test_freed_memory_is_nan_for_work_that_still_uses_it(mesh_device: Devices) -> None:
    side = torch.Stream("mesh:0")
    x = torch.ones(3, device="mesh:0")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x + 1
    del x
    side.synchronize()
    assert y.isnan().all()
    (race,) = mesh_device.take_races()
    assert (race.first.work, race.second.work) == ("aten::add", "free")


def test_record_stream_delays_the_free(mesh_device: Devices) -> None:
    side = torch.Stream("mesh:0")
    x = torch.ones(3, device="mesh:0")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x + 1
    x.record_stream(side)
    del x
    side.synchronize()
    assert y.tolist() == [2, 2, 2]


def test_memory_of_a_stream_is_freed_in_its_order(mesh_device: Devices) -> None:
    side = torch.Stream("mesh:0")
    with side:
        x = torch.ones(3, device="mesh:0")
        y = x + 1
        del x
    side.synchronize()
    assert y.tolist() == [2, 2, 2]


def test_statistics(mesh_device: Devices) -> None:
    before = torch.accelerator.memory_allocated(2)
    torch.accelerator.reset_peak_memory_stats(2)
    x = torch.empty(1000, device="mesh:2")
    y = torch.empty(500, device="mesh:2")
    del x
    assert torch.accelerator.memory_allocated(2) - before == 2000
    assert torch.accelerator.max_memory_allocated(2) - before == 6000
    del y
    assert torch.accelerator.memory_allocated(2) == before


def test_counts(mesh_device: Devices) -> None:
    x = torch.ones(3, device="mesh:0")
    with mesh_device.counting() as counted:
        y = x + 1
        y.view(3, 1).t()
    assert (counted.counts.launches, counted.counts.allocations, counted.counts.host_reads) == (1, 1, 0)
    with mesh_device.counting() as counted:
        y.sum().item()
        y.nonzero()
        y.cpu()
    assert counted.counts.host_reads == 3


def test_pinned_memory(mesh_device: Devices) -> None:
    x = torch.ones(3).pin_memory()
    assert x.is_pinned()
    assert not torch.ones(3).is_pinned()
    assert x[1:].is_pinned()


def test_a_copy_to_pinned_memory_needs_a_wait(mesh_device: Devices) -> None:
    target = torch.zeros(3).pin_memory()
    target.copy_(torch.ones(3, device="mesh:0"), non_blocking=True)
    assert target.isnan().all()
    torch.accelerator.synchronize(0)
    assert target.tolist() == [1, 1, 1]


def test_a_pinned_source_must_not_change(mesh_device: Devices) -> None:
    source = torch.ones(3).pin_memory()
    side = torch.Stream("mesh:0")
    with side:
        x = torch.empty(3, device="mesh:0").copy_(source, non_blocking=True)
    source.fill_(5)
    side.synchronize()
    assert x.tolist() == [5, 5, 5]
