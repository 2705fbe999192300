"""The streams of a device as rows of a trace, in its own time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.comm import current_communicator
from tests.device.communicator import run_on_devices
from tests.device.inspection import Devices

LATENCY = 1e-3


def test_streams_are_rows_of_a_trace(mesh_device: Devices, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def program(device: torch.device) -> list[tuple[str, str, float]]:
        here = current_communicator()
        x = torch.ones(4, device=device)
        with mw.trace_comm() as trace:
            here.all_reduce(x, "sum", (0, 1))
            here.send(x, 1 - here.rank, 3)
            here.receive(1 - here.rank, 3, (4,), torch.float32, device)
        assert trace.streams[0].began <= trace.streams[-1].began
        trace.save(path)
        return [(work.stream, work.what, work.seconds) for work in trace.streams]

    found = mw.simulate(run_on_devices(program, latency=LATENCY), 2)
    for rank, works in enumerate(found):
        peer = 1 - rank
        assert [work[:2] for work in works] == [
            ("collectives", "all_reduce"),
            (f"messages to {peer}", "send"),
            (f"messages from {peer}", "receive"),
        ]
    assert min(works[0][2] for works in found) == pytest.approx(LATENCY, rel=0.1)  # the other rank has waited
    events = json.loads(path.read_text())["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 0}
    assert {"stream: collectives", "stream: messages to 1", "stream: messages from 1"} <= rows
    assert {event["name"] for event in events if event.get("cat") == "stream"} == {"all_reduce", "send", "receive"}
