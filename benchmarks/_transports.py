"""The transports of processes on one host, and the calls that a step makes to Gloo.

Shared memory exists between the processes of one host only. Gloo stands for every other transport. The rivals always
use Gloo, so a case without shared memory has the same transport on both sides.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from meshwright.comm import CommCall, Counters, current_communicator
from meshwright.comm.process.small_calls import is_small

SHARED, GLOO = "shared memory", "Gloo"
TRANSPORTS = (SHARED, GLOO)
_BYTES = {"float": 4, "double": 8, "long int": 8, "int": 4, "unsigned char": 1, "signed char": 1, "bool": 1}
"""Bytes of an element by torch's name of its dtype in a trace; other dtypes have two."""


def environment(gloo: bool) -> dict[str, str]:
    """Return the environment of processes that use Gloo, or shared memory."""
    return {"MESHWRIGHT_SHARED_MEMORY": "off" if gloo else "on"}


def gloo_calls(step: Callable[[], Any]) -> dict[str, int]:
    """Return the collectives of a step on this rank, the messages of Gloo that replace some, and the bytes sent.

    Messages and bytes are read from torch's own trace, so that compiled code and C++ of torch are counted in the same
    way as ours. One of our collectives may consist of messages, so ours are counted by the communicator. Its call
    `any_true` moves no data. Its small calls do not use Gloo; their bytes are added.
    """
    seen = current_communicator().seen
    before = _collectives(seen)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with seen.record_calls() as log, torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    sends = [e for e in events if e.get("name", "").startswith("gloo:") and e["name"] != "gloo:recv"]
    messages = sum(event["name"] == "gloo:send" for event in sends)
    ours = _collectives(seen) - before
    return {
        "calls": ours or len(sends) - messages,
        "messages": messages,
        "bytes": sum(map(_bytes_of, sends)) + sum(map(_in_frames, log)),
    }


def _collectives(seen: Counters) -> int:
    """Return the number of collectives that moved data so far."""
    return seen.total_calls - seen.calls.get("any_true", 0)


def _in_frames(call: CommCall) -> int:
    """Return the bytes that this rank sends in the frames of a call."""
    return call.numel * call.dtype.itemsize * (len(call.group) - 1) if call.dtype and is_small(call) else 0


def _bytes_of(event: Mapping[str, Any]) -> int:
    """Return the bytes of the tensors of an event."""
    about = event.get("args", {})
    pairs = zip(about.get("Input Dims", []), about.get("Input type", []), strict=True)
    return sum(prod(dims) * _BYTES.get(kind, 2) for dims, kind in pairs if kind)
