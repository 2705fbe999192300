"""Tickets: started conversions have the bits of finished ones, and every wait of a stream is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.comm import current_communicator
from meshwright.comm.communicators.communicator import Communicator
from meshwright.comm.streams.communication_streams import CommunicationStreams
from meshwright.comm.streams.host_copy import begin_host_copy
from meshwright.layout import ProcessMesh, Spec, parse_spec
from meshwright.reshard import ConversionPlan, plan
from tests.device.communicator import run_on_devices
from tests.device.inspection import Devices, Timing
from tests.device.waits import leaving_out, recording_waits

RANKS = 4
ALL = (0, 1, 2, 3)
LINE = ProcessMesh(ALL, ["x"])
SQUARE = ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
LOW, HIGH = ProcessMesh([0, 1], ["x"]), ProcessMesh([2, 3], ["x"])

PLANS: dict[str, tuple[str, ProcessMesh, str, ProcessMesh]] = {
    "all_reduce": ("f32[6, 4] +x", LINE, "f32[6, 4]", LINE),
    "all_reduce of maxima": ("i64[6, 4] +x:max", LINE, "i64[6, 4]", LINE),
    "all_reduce of means": ("f32[6, 4] +x:avg", LINE, "f32[6, 4]", LINE),
    "all_gather": ("f32[6@x, 4]", LINE, "f32[6, 4]", LINE),
    "all_gather of columns": ("f32[6, 8@x]", LINE, "f32[6, 8]", LINE),
    "all_gather over two axes": ("f32[8@x@y, 4]", SQUARE, "f32[8, 4]", SQUARE),
    "reduce_scatter": ("f32[6, 4] +x", LINE, "f32[6@x, 4]", LINE),
    "reduce_scatter of columns": ("f32[6, 8] +x", LINE, "f32[6, 8@x]", LINE),
    "all_to_all": ("f32[6@x, 5]", LINE, "f32[6, 5@x]", LINE),
    "exchange": ("f32[6@x, 4]", LOW, "f32[6@x, 4]", HIGH),
    "conversion": ("f32[6@x, 4] +y", SQUARE, "f32[6, 4]", SQUARE),
    "no communication": ("f32[6, 4]", LINE, "f32[6@x, 4]", LINE),
}


def _plan(name: str) -> ConversionPlan:
    before, source, after, target = PLANS[name]
    return plan(parse_spec(before, source), parse_spec(after, target))


def _local(spec: Spec, device: torch.device | str) -> Tensor:
    """Return this rank's part, with other values on each rank."""
    rank = current_communicator().rank
    x = torch.arange(24.0 * 4, device=device).mul(0.7 + rank).sin() * 9
    shape = spec.local_shape(rank)
    return x[: torch.Size(shape).numel()].view(shape).to(spec.dtype)


def _no_record_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Tensor, stream: torch.Stream) -> None:
        raise AssertionError("record_stream: memory would be freed at a time that depends on the device")

    monkeypatch.setattr(torch.Tensor, "record_stream", refuse)


def _converted(way: ConversionPlan, device: torch.device | str) -> Tensor:
    with torch.no_grad():
        return current_communicator().convert(way, _local(way.src, device)).cpu()


def _started(way: ConversionPlan, device: torch.device) -> list[Tensor]:
    """Return the results of two conversions in flight at once, computed beside other work and freed memory."""
    with torch.no_grad():
        here = current_communicator()
        first = here.start(way, _local(way.src, device))
        second = here.start(way, _local(way.src, device) * 2)
        other = torch.ones(64, device=device).cumsum(0)
        parts = [second.wait() / 2, first.wait() + 0, first.wait()]
        assert other.sum().item() == 32 * 65
        return [part.to(way.src.dtype).cpu() for part in parts]


@pytest.mark.parametrize("name", PLANS)
def test_bits_are_those_of_finished_conversions(
    mesh_device: Devices, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _no_record_stream(monkeypatch)
    way = _plan(name)
    expected = mw.simulate(lambda: _converted(way, "cpu"), RANKS)
    assert_equal(way, expected, [[part] for part in mw.simulate(run_on_devices(lambda d: _converted(way, d)), RANKS)])
    assert_equal(way, expected, mw.simulate(run_on_devices(lambda d: _started(way, d)), RANKS))


def assert_equal(way: ConversionPlan, expected: list[Tensor], found: list[list[Tensor]]) -> None:
    for rank, parts in enumerate(found):
        for part in parts:
            assert torch.equal(part, expected[rank]) or rank not in way.dst.mesh


def test_the_host_waits_for_nothing(mesh_device: Devices) -> None:
    def program(device: torch.device) -> tuple[int, int]:
        me = current_communicator()
        made = [_plan(name) for name in PLANS]
        operands = [_local(way.src, device) for way in made]
        me.barrier(ALL)
        with mesh_device.counting() as counted:
            for way, x in zip(made, operands, strict=True):
                me.start(way, x).wait()
                me.convert(way, x)
            me.barrier(ALL)
        me.barrier(ALL)  # no rank is at its end, where it waits, before all ranks have counted
        return counted.counts.host_waits, counted.counts.host_reads

    with torch.no_grad():
        assert mw.simulate(run_on_devices(program), RANKS) == [(0, 0)] * RANKS


def _blocking_calls(me: Communicator, device: torch.device) -> list[Tensor]:
    """Return the results of every collective and message, each of them used before the next call."""
    x = torch.full((4, 2), me.rank + 1.0, device=device)
    pieces = list(x.split(1))
    peer = me.rank ^ 1
    found = [me.all_reduce(x, "sum", ALL) + 1, me.reduce_scatter(pieces, "sum", ALL) + 1]
    found += [each + 1 for each in me.all_gather(x, ALL, [(4, 2)] * RANKS)]
    found += [each + 1 for each in me.all_to_all(pieces, [(1, 2)] * RANKS, ALL)]
    found += [each + 1 for each in me.exchange([(peer, x)], [(peer, (4, 2), x.dtype, device)], ALL)]
    me.send(x, peer, 7)
    x.zero_()
    return [*found, me.receive(peer, 7, (4, 2), torch.float32, device) + 1]


def _started_calls(me: Communicator, device: torch.device) -> list[Tensor]:
    """Return the results of every kind of conversion; the first of two tickets is dropped."""
    found: list[Tensor] = []
    for name in PLANS:
        way = _plan(name)
        me.start(way, _local(way.src, device))
        x = _local(way.src, device)
        found.append(me.start(way, x).wait() + 1)
    return found


def _on_another_stream(me: Communicator, device: torch.device) -> list[Tensor]:
    """Return a result that another stream than that of the start has waited for."""
    way = _plan("all_reduce")
    begun = me.start(way, _local(way.src, device))
    other = torch.Stream(device)
    with other:
        out = begun.wait() * 2
    del begun
    done = other.record_event()
    torch.accelerator.current_stream(device).wait_event(done)
    return [out]


PROGRAMS: dict[str, Callable[[Communicator, torch.device], list[Tensor]]] = {
    "blocking calls": _blocking_calls,
    "tickets": _started_calls,
    "tickets of another stream": _on_another_stream,
}


def _run(name: str) -> list[list[Tensor]]:
    def program(device: torch.device) -> list[Tensor]:
        with torch.no_grad():
            return [each.cpu() for each in PROGRAMS[name](current_communicator(), device)]

    return mw.simulate(run_on_devices(program), RANKS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_wait_is_needed(mesh_device: Devices, name: str) -> None:
    with recording_waits() as names:
        _run(name)
    assert not mesh_device.take_races()
    assert names
    unnoticed = [where for where in sorted(set(names)) if not _is_found(mesh_device, name, where)]
    assert not unnoticed


def _is_found(devices: Devices, name: str, where: str) -> bool:
    """True if the program without the wait has a race."""
    with leaving_out(where):
        _run(name)
    return bool(devices.take_races())


def test_a_copy_to_the_host_leaves_the_host_free(mesh_device: Devices) -> None:
    x = torch.arange(6.0, device="mesh:0")
    with mesh_device.counting() as counted:
        found, wait = begin_host_copy(x, CommunicationStreams(), "messages to 1")
        x.zero_()
        del x
    assert counted.counts.host_waits == 0
    wait()
    assert found.tolist() == [0, 1, 2, 3, 4, 5]


def _fail_after(x: Tensor) -> None:
    x.add_(1)
    raise ValueError("late")


def test_an_error_inside_a_call_frees_no_memory_in_use(mesh_device: Devices) -> None:
    """The current stream waits for what was queued before the error."""

    def program(device: torch.device) -> None:
        me: Any = current_communicator()
        x = torch.ones(4, device=device)
        with pytest.raises(ValueError, match="late"), me.streams.after_current(device, "side", "test"):
            _fail_after(x)
        del x

    mw.simulate(run_on_devices(program), 1)


def test_conversions_run_beside_other_work(mesh_device: Devices) -> None:
    """Ten kernels of one second run while a gather of ten seconds is in flight."""
    way = _plan("all_gather")

    def program(device: torch.device) -> None:
        with torch.no_grad():
            x = torch.ones(way.src.local_shape(current_communicator().rank), device=device)
            begun = current_communicator().start(way, x)
            for _ in range(10):
                x = x + 1
            begun.wait()

    with mesh_device.priced(1.0, 1e30, 1e30), mesh_device.recording_timeline() as timeline:
        mw.simulate(run_on_devices(program, latency=10, bandwidth=1e30), RANKS)
    for device in ALL:
        own = [t for t in timeline if t.device == device]
        assert _seconds(own, "all_gather") == pytest.approx((1, 11))
        assert _seconds(own, "aten::add") == pytest.approx((1, 11))


def _seconds(timeline: list[Timing], name: str) -> tuple[float, float]:
    """Return the start of the first and the end of the last work with this name, after the first work of the device."""
    begin = min(t.start for t in timeline)
    found = [t for t in timeline if t.name == name]
    return min(t.start for t in found) - begin, max(t.end for t in found) - begin
