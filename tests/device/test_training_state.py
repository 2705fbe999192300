"""State of a training run on devices: random generators in checkpoints, optimizer states on the host, peak memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.engine.eager.master_weights import HostStorage
from meshwright.engine.recording.digest import common_part
from meshwright.engine.training.clip_grad_norm import gradient_norm
from meshwright.layout import generator_states, set_generator_states
from tests.device.inspection import Devices
from tests.device.training import Training


def test_a_checkpoint_restores_the_generator_of_the_device(mesh_device: Devices, tmp_path: Path) -> None:
    network = nn.Linear(2, 2).to("mesh:0")
    torch.manual_seed(3)
    torch.rand(3, device="mesh:0")
    mw.save_checkpoint(tmp_path, 1, network)
    expected = [torch.rand(3, device=device).cpu() for device in ("mesh:0", "cpu")]
    mw.load_checkpoint(tmp_path, network)
    for device, values in zip(("mesh:0", "cpu"), expected, strict=True):
        assert torch.equal(torch.rand(3, device=device).cpu(), values)


def test_states_of_all_generators_are_restored(mesh_device: Devices) -> None:
    def draws() -> list[Tensor]:
        return [torch.rand(2, device=device).cpu() for device in ("cpu", "mesh:0", "mesh:3")]

    torch.manual_seed(4)
    states = generator_states()
    expected = draws()
    set_generator_states(states)
    assert list(states) == ["cpu", *(f"mesh:{at}" for at in range(mesh_device.count))]
    assert all(map(torch.equal, draws(), expected))


def test_optimizer_states_on_the_host_have_the_bits_of_states_on_the_device(mesh_device: Devices) -> None:
    def trained(device: str, offload: bool) -> list[Tensor]:
        torch.manual_seed(5)
        model = nn.Linear(8, 8).to(device)
        optimizer = mw.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), offload=offload)
        for _ in range(3):
            model(torch.linspace(-1, 1, 16).view(2, 8).to(device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    expected = trained("cpu", False)
    for offload in (False, True):
        assert all(map(torch.equal, trained("mesh:1", offload), expected))


def test_the_host_storage_pins_its_memory(mesh_device: Devices) -> None:
    storage, x = HostStorage(), torch.arange(4.0).to("mesh:2")
    kept = storage.keep(x, None)
    assert kept.is_pinned()
    storage.wait()
    assert torch.equal(kept, torch.arange(4.0))
    assert torch.equal(storage.bring(kept, x.device).cpu(), torch.arange(4.0))


def test_programs_of_two_devices_differ_and_have_one_number(mesh_device: Devices) -> None:
    """Processes compare the numbers of their programs; each process has a device of its own."""

    def trained(device: str) -> str | None:
        training = Training("dp", True, device)
        training.step()
        (variant,) = (each for variants in training._step._variants.known.values() for each in variants)
        return variant.digest

    first, second, on_cpu = (mw.simulate(trained, 1, device)[0] for device in ("mesh:0", "mesh:1", "cpu"))
    assert first != second
    assert common_part(first) == common_part(second) != common_part(on_cpu)


def test_states_that_are_loaded_are_where_the_optimizer_makes_them(mesh_device: Devices, tmp_path: Path) -> None:
    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(6)
        model = nn.Linear(4, 4).to("mesh:0")
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        model(torch.linspace(-1, 1, 8).view(2, 4).to("mesh:0")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    first, again = built(), built()
    step(*first)
    mw.save_checkpoint(tmp_path, 1, *first)
    mw.load_checkpoint(tmp_path, *again)
    devices, expected = (
        [(key, x.device) for state in optimizer.state.values() for key, x in state.items()]
        for _, optimizer in (again, first)
    )
    assert devices == expected
    assert all(map(torch.equal, step(*again), step(*first)))


def test_the_norm_of_no_gradient_is_on_the_device(mesh_device: Devices) -> None:
    model = nn.Linear(2, 2).to("mesh:0")
    assert gradient_norm(model.parameters()).device == torch.device("mesh:0")


def test_a_mesh_takes_ranks_on_a_device(mesh_device: Devices) -> None:
    ranks = torch.arange(4, device="mesh:0").view(2, 2)
    assert mw.ProcessMesh(ranks, ["a", "b"]) is mw.ProcessMesh([[0, 1], [2, 3]], ["a", "b"])
