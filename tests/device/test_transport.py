"""Collectives and messages between devices: right numbers, virtual times, and missing waits that are found."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.comm import current_communicator
from meshwright.comm.communicators.communicator import Communicator
from meshwright.comm.communicators.queued_communicator import QueuedCommunicator
from tests.device.communicator import run_on_devices
from tests.device.inspection import Devices, Timing

ALL = (0, 1, 2, 3)


def _here() -> Communicator:
    return current_communicator()


def _stream(device: torch.device) -> torch.Stream:
    """Return the stream of collectives of this rank."""
    me = _here()
    assert isinstance(me, QueuedCommunicator)
    return me.streams.stream(device)


def test_collectives_have_the_numbers_of_the_simulation(mesh_device: Devices) -> None:
    def program(device: torch.device | None) -> list[Tensor]:
        me = _here()
        x = torch.arange(6.0, device=device).sin() * (me.rank + 1)
        pieces = list(x.view(3, 2).repeat(2, 1)[:4].split(1))
        found = [me.all_reduce(x, "sum", ALL), me.all_reduce(x, "max", ALL)]
        found += me.all_gather(x[: me.rank + 1], ALL, [(n + 1,) for n in ALL])
        found += [me.reduce_scatter(pieces, "avg", ALL)]
        found += me.all_to_all(pieces, [(1, 2)] * 4, ALL)
        if me.rank == 0:
            me.send(x, 3, 7)
        if me.rank == 3:
            found.append(me.receive(0, 7, (6,), torch.float32, x.device))
        return [t.cpu() for t in found]

    expected = mw.simulate(lambda: program(None), 4)
    for ours, theirs in zip(mw.simulate(run_on_devices(program), 4), expected, strict=True):
        assert len(ours) == len(theirs)
        assert all(map(torch.equal, ours, theirs))


def test_tensors_on_the_host_are_reduced_at_once(mesh_device: Devices) -> None:
    def program(device: torch.device) -> tuple[list[float], list[float]]:
        me = _here()
        total = me.all_reduce(torch.full((2,), float(me.rank)), "sum", ALL)
        me.send(total + me.rank, (me.rank + 1) % 4, 3)
        return total.tolist(), me.receive((me.rank - 1) % 4, 3, (2,), torch.float32, "cpu").tolist()

    found = mw.simulate(run_on_devices(program), 4)
    assert found == [([6, 6], [6 + (rank - 1) % 4] * 2) for rank in ALL]


def _times(timeline: list[Timing], device: int, name: str) -> list[tuple[float, float]]:
    return [(t.start, t.end) for t in timeline if t.device == device and t.name == name]


def test_a_collective_starts_with_the_last_member(mesh_device: Devices) -> None:
    def program(device: torch.device) -> None:
        me = _here()
        x = torch.zeros(4, device=device)
        for _ in range(me.rank):
            x = x + 1
        me.all_reduce(x, "sum", ALL)

    with mesh_device.priced(1.0, 1e30, 1e30), mesh_device.recording_timeline() as timeline:
        mw.simulate(run_on_devices(program, latency=10, bandwidth=1e30), 4)
    ends = [_times(timeline, device, "all_reduce")[0][1] for device in ALL]
    last = max(t.end for t in timeline if t.device == 3 and t.name != "all_reduce")
    assert ends == pytest.approx([last + 10] * 4)


def test_the_rank_that_receives_most_sets_the_time(mesh_device: Devices) -> None:
    """Rank 0 calls first and receives fewer bytes than the others."""

    def program(device: torch.device) -> None:
        me = _here()
        shapes = [(10,) if rank == 0 else (1,) for rank in ALL]
        me.all_gather(torch.zeros(shapes[me.rank], device=device), ALL, shapes)

    with mesh_device.priced(0, 1e30, 1e30), mesh_device.recording_timeline() as timeline:
        mw.simulate(run_on_devices(program, latency=0, bandwidth=4), 4)
    for device in ALL:
        ((start, end),) = _times(timeline, device, "all_gather")
        assert end - start == pytest.approx(12)


def test_a_missing_wait_for_a_collective(mesh_device: Devices) -> None:
    def program(device: torch.device, waits: bool) -> list[float]:
        me, stream = _here(), _stream(device)
        x = torch.full((2,), float(me.rank), device=device)
        out = torch.zeros(2, device=device)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            total = me.all_reduce(x, "sum", ALL)
        x.record_stream(stream)
        if waits:
            torch.accelerator.current_stream().wait_stream(stream)
        total.record_stream(torch.accelerator.current_stream())
        return (out + total).tolist()

    assert mw.simulate(run_on_devices(lambda d: program(d, True)), 4) == [[6, 6]] * 4
    assert not mesh_device.take_races()
    found = mw.simulate(run_on_devices(lambda d: program(d, False)), 4)
    assert all(value != value for values in found for value in values)
    races = mesh_device.take_races()
    assert {(race.first.work, race.second.work) for race in races} == {("all_reduce", "aten::add")}


def test_calls_in_another_order_are_refused(mesh_device: Devices) -> None:
    def program(device: torch.device) -> None:
        me, stream = _here(), _stream(device)
        x = torch.ones(2, device=device)
        groups = [(0, 1), (0, 1, 2, 3)]
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            for group in groups if me.rank else groups[::-1]:
                if me.rank in group:
                    me.all_reduce(x, "sum", group)
        x.record_stream(stream)

    with pytest.raises((RuntimeError, mw.MeshwrightError), match="same order on all ranks"):
        mw.simulate(run_on_devices(program), 4)
    _drop_queued_work()
    mesh_device.take_races()


def _drop_queued_work() -> None:
    """Run the work that a failed simulation has left in the queues; all of it raises errors."""
    for device in ALL * 4:
        with suppress(RuntimeError, mw.MeshwrightError):
            torch.accelerator.synchronize(device)


def test_a_message_leaves_while_the_sender_waits_in_a_collective(mesh_device: Devices) -> None:
    def program(device: torch.device) -> list[float]:
        here, x = _here(), torch.full((2,), float(device.index), device=device)
        if device.index == 1:
            here.send(x, 0, tag=1)
        else:
            x = here.receive(1, 1, (2,), torch.float32, device)
        return here.all_reduce(x, "sum", (0, 1)).tolist()

    assert mw.simulate(run_on_devices(program), 2) == [[2.0, 2.0]] * 2
