"""Every device has a generator of its own."""

from __future__ import annotations

import torch

from tests.device.inspection import Devices


def test_manual_seed_seeds_all_devices(mesh_device: Devices) -> None:
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    for device in range(mesh_device.count):
        assert torch.equal(torch.randn(4, device=f"mesh:{device}").cpu(), expected)


def test_devices_draw_independently(mesh_device: Devices) -> None:
    torch.manual_seed(3)
    torch.randn(4, device="mesh:0")
    first = torch.randn(4, device="mesh:1")
    assert not torch.equal(torch.randn(4, device="mesh:0").cpu(), first.cpu())
    before = torch.get_rng_state()
    torch.randn(4, device="mesh:0")
    assert torch.equal(torch.get_rng_state(), before)


def test_states_are_restored(mesh_device: Devices) -> None:
    state = torch.mesh.get_rng_state("mesh:2")
    first = torch.randn(4, device="mesh:2")
    torch.mesh.set_rng_state(state, "mesh:2")
    assert torch.equal(torch.randn(4, device="mesh:2"), first)
    with torch.random.fork_rng(devices=[2], device_type="mesh"):
        torch.randn(4, device="mesh:2")
    torch.mesh.set_rng_state(state, "mesh:2")
    assert torch.equal(torch.randn(4, device="mesh:2"), first)


def test_own_generators(mesh_device: Devices) -> None:
    generator = torch.Generator("mesh:0").manual_seed(5)
    first = torch.rand(4, device="mesh:0", generator=generator)
    assert torch.equal(first.cpu(), torch.rand(4, generator=torch.Generator().manual_seed(5)))
    assert not torch.equal(torch.rand(4, device="mesh:0", generator=generator), first)


def test_queued_draws_keep_their_order(mesh_device: Devices) -> None:
    torch.manual_seed(4)
    expected = [torch.rand(4), torch.rand(4)]
    torch.manual_seed(4)
    side = torch.Stream("mesh:0")
    with side:
        first = torch.rand(4, device="mesh:0")
    second = torch.rand(4, device="mesh:0")
    side.synchronize()
    assert torch.equal(first.cpu(), expected[0])
    assert torch.equal(second.cpu(), expected[1])
