"""Messages for which a stream waits while the host goes on: bits, needed waits, and errors."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.comm import CommError, launch
from meshwright.comm.process.late_messages import LateMessages
from meshwright.comm.streams.communication_streams import CommunicationStreams
from tests.device import _late_message_program as program
from tests.device.build import build
from tests.device.inspection import Devices
from tests.device.process_backend import QueuedSignal
from tests.device.waits import leaving_out

DEVICE = "mesh:0"
X = torch.arange(3.0)


class Received:
    """A message that arrives after the host has queued work behind it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.errors: list[CommError] = []
        self._error, self._arrived = error, threading.Event()
        device = torch.device(DEVICE)
        late = LateMessages(1, device, QueuedSignal(device), CommunicationStreams(), self.errors.append)
        with torch.Stream(DEVICE) as stream:
            out = torch.empty(3, device=DEVICE)
            late.queue(out, self._fetch)
            self.twice = out * 2
            del out
            self._arrived.set()
            stream.synchronize()
        late.drain()

    def _fetch(self) -> Tensor:
        assert self._arrived.wait(10)
        if self._error is not None:
            raise self._error
        return X.view(torch.uint8)


def test_the_host_goes_on_before_the_message_arrives(mesh_device: Devices) -> None:
    assert Received().twice.tolist() == (X * 2).tolist()


@pytest.mark.parametrize("wait", ["operands of receive", "results of receive"])
def test_each_wait_is_needed(mesh_device: Devices, wait: str) -> None:
    with leaving_out(wait):
        Received()
    assert mesh_device.take_races()


@pytest.mark.parametrize("error", [CommError("a", "b", "c", "d"), RuntimeError("b")])
def test_an_error_reaches_the_host_and_the_stream_goes_on(mesh_device: Devices, error: Exception) -> None:
    received = Received(error)
    (found,) = received.errors
    assert str(error) in str(found)
    assert received.twice.isnan().all()


@pytest.mark.usefixtures("forked_processes")
def test_processes_receive_while_their_hosts_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    assert launch([program.__file__, str(tmp_path)], 2, timeout=60) == 0
    (_, races), (found, more_races) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert races == more_races == 0
    assert found["firsts"] == [float(n + tag) for n in range(program.ROUNDS) for tag in range(program.MESSAGES)]
    assert found["one tag"] == [[1.0] * 3, [program.OF_HOST] * 3]
    assert found["lasts"] == [2.0 * (program.ROUNDS + tag) for tag in range(program.MESSAGES)]
    assert "rank 0 calls send(float32, (4,), tag 0)" in found["error"]
    assert found["is nan"]
