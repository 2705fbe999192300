"""Work on streams is queued until something waits, so a missing wait is a wrong number and a race."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.device.inspection import Devices


def _side() -> torch.Stream:
    side = torch.Stream("mesh:0")
    side.wait_stream(torch.accelerator.current_stream(0))
    return side


def _work(side: torch.Stream) -> tuple[Tensor, torch.Event]:
    x = torch.ones(4, device="mesh:0")
    side.wait_stream(torch.accelerator.current_stream(0))
    with side:
        y = x + 1
    x.record_stream(side)
    return y, side.record_event()


def test_a_missing_wait_is_a_wrong_number_and_a_race(mesh_device: Devices) -> None:
    y, _ = _work(_side())
    assert (y * 2).isnan().all()
    (race,) = mesh_device.take_races()
    assert (race.first.work, race.second.work) == ("aten::add", "aten::mul")
    assert (race.first.stream, race.second.stream)[1] == "stream 0 of mesh:0"


def test_an_event_wait_runs_the_work(mesh_device: Devices) -> None:
    y, done = _work(_side())
    done.wait(torch.accelerator.current_stream(0))
    assert (y * 2).tolist() == [4] * 4
    y.record_stream(torch.accelerator.current_stream(0))


def test_the_host_can_wait(mesh_device: Devices) -> None:
    for wait in (
        lambda side, done: done.synchronize(),
        lambda side, done: side.synchronize(),
        lambda side, done: torch.accelerator.synchronize(0),
    ):
        side = _side()
        y, done = _work(side)
        wait(side, done)
        assert (y * 2).tolist() == [4] * 4


def test_an_event_is_finished_at_the_second_question(mesh_device: Devices) -> None:
    y, done = _work(_side())
    assert not done.query()
    assert done.query()
    assert (y * 2).tolist() == [4] * 4


def test_waits_of_queued_streams_are_queued(mesh_device: Devices) -> None:
    first, second = _side(), _side()
    y, done = _work(first)
    with second:
        done.wait(second)
        z = y + 1
    end = second.record_event()
    assert not first.query()
    end.wait(torch.accelerator.current_stream(0))
    assert z.tolist() == [3] * 4


def test_an_event_waits_for_work_before_it_only(mesh_device: Devices) -> None:
    side = _side()
    y, done = _work(side)
    with side:
        y.add_(1)
    done.wait(torch.accelerator.current_stream(0))
    assert y.tolist() == [2] * 4
    assert [race.second.work for race in mesh_device.take_races()] == ["copy to host"]
    torch.accelerator.synchronize(0)
    assert y.tolist() == [3] * 4


def test_an_input_that_is_overwritten_too_early(mesh_device: Devices) -> None:
    side = _side()
    x = torch.ones(4, device="mesh:0")
    side.wait_stream(torch.accelerator.current_stream(0))
    with side:
        y = x + 1
    x.fill_(5)
    side.synchronize()
    assert y.tolist() == [6] * 4
    (race,) = mesh_device.take_races()
    assert (race.first.work, race.second.work) == ("aten::add", "aten::fill_")


def test_work_that_starts_too_early_is_a_race(mesh_device: Devices) -> None:
    """The default stream runs at once, so the number is right; the check finds the missing edge."""
    side = torch.Stream("mesh:0")
    x = torch.ones(4, device="mesh:0")
    with side:
        y = x + 1
    side.synchronize()
    assert y.tolist() == [2] * 4
    (race,) = mesh_device.take_races()
    assert race.second.work == "aten::add"


def test_parts_of_a_buffer_do_not_conflict(mesh_device: Devices) -> None:
    side = _side()
    x = torch.zeros(8, device="mesh:0")
    side.wait_stream(torch.accelerator.current_stream(0))
    with side:
        x[:4].add_(1)
    x[4:].add_(2)
    side.synchronize()
    assert x.tolist() == [1] * 4 + [2] * 4


def test_places_of_a_race(mesh_device: Devices) -> None:
    with mesh_device.recording_places():
        y, _ = _work(_side())
        y * 2
    y.record_stream(torch.accelerator.current_stream(0))
    (race,) = mesh_device.take_races()
    assert "test_streams.py:" in str(race)


def test_errors_of_queued_work_appear_at_the_wait(mesh_device: Devices) -> None:
    side = _side()
    with side:
        index = torch.full((2,), 9, device="mesh:0")
        x = torch.zeros(3, device="mesh:0")
        x.index_select(0, index)
    with pytest.raises(IndexError):
        side.synchronize()
    torch.accelerator.synchronize(0)


def test_backward_on_a_side_stream(mesh_device: Devices) -> None:
    """Autograd runs each node on the stream of its forward, and waits where streams meet."""
    side = _side()
    w = torch.full((4,), 3.0, device="mesh:0", requires_grad=True)
    side.wait_stream(torch.accelerator.current_stream(0))
    with side:
        y = (w * w).sum()
    torch.accelerator.current_stream(0).wait_stream(side)
    (y * 2).backward()
    assert w.grad is not None
    assert w.grad.tolist() == [12] * 4


def test_virtual_time(mesh_device: Devices) -> None:
    side = _side()
    with mesh_device.priced(1.0, 1e30, 1e30), mesh_device.recording_timeline() as timeline:
        x = torch.ones(4, device="mesh:0")
        side.wait_stream(torch.accelerator.current_stream(0))
        with side:
            y = x + 1
        x * 3
        x * 4
        torch.accelerator.current_stream(0).wait_stream(side)
        y + 1
        y.record_stream(torch.accelerator.current_stream(0))
    start = timeline[0].start
    shown = sorted((round(t.start - start), round(t.end - start), t.stream > 0, t.name) for t in timeline)
    assert shown == [
        (0, 1, False, "aten::fill_"),
        (1, 2, False, "aten::mul"),
        (1, 2, True, "aten::add"),
        (2, 3, False, "aten::mul"),
        (3, 4, False, "aten::add"),
    ]
