"""The waits of streams in a program: which there are, and a program without one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Generator
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch

from meshwright.comm.streams import communication_streams

Wait = Callable[[torch.Stream, torch.Event, str], None]


@contextmanager
def _replacing_wait(new: Wait) -> Generator[None]:
    before = communication_streams.wait
    communication_streams.wait = new
    try:
        yield
    finally:
        communication_streams.wait = before


@contextmanager
def recording_waits(device: int = 0) -> Generator[list[str]]:
    """Yield a list to which the name of each wait of the streams of one device inside the block is appended."""
    names: list[str] = []
    wait = communication_streams.wait

    def record(stream: torch.Stream, event: torch.Event, where: str) -> None:
        if stream.device_index == device:
            names.append(where)
        wait(stream, event, where)

    with _replacing_wait(record):
        yield names


@contextmanager
def leaving_out(where: str) -> Generator[None]:
    """Leave out the waits whose name matches the pattern `where`, inside the block."""
    with _leaving_out_if(lambda name, at: fnmatchcase(name, where)):
        yield


@contextmanager
def leaving_out_at(indices: Container[int]) -> Generator[None]:
    """Leave out the waits with these indices inside the block; each device counts the waits of its own streams."""
    with _leaving_out_if(lambda name, at: at in indices):
        yield


@contextmanager
def _leaving_out_if(is_left_out: Callable[[str, int], bool]) -> Generator[None]:
    counts: Counter[int] = Counter()
    wait = communication_streams.wait

    def wait_unless_left_out(stream: torch.Stream, event: torch.Event, name: str) -> None:
        at = counts[stream.device_index]
        counts[stream.device_index] += 1
        if not is_left_out(name, at):
            wait(stream, event, name)

    with _replacing_wait(wait_unless_left_out):
        yield
