"""Times of the work on communication streams, by events of the device."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StreamWork:
    """Work on a communication stream: what it does, its start in seconds from the begin of the timing, its duration."""

    stream: str
    what: str
    began: float
    seconds: float


class StreamTimes:
    """The work that is queued on the communication streams of a device from now on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[str, str, torch.Event, torch.Event]] = []
        torch.accelerator.synchronize(device)  # so that the first event happens now
        self._first = self.begin()

    def begin(self) -> torch.Event:
        """Return an event at the present point of the current stream."""
        here = torch.accelerator.current_stream(self._device)
        return here.record_event(torch.Event(self._device, enable_timing=True))

    def end(self, stream: str, what: str, began: torch.Event) -> None:
        """Add work that has begun at an event of the current stream and ends at its present point."""
        self._events.append((stream, what, began, self.begin()))

    def works(self) -> list[StreamWork]:
        """Wait for the device, and return its work, without that of graphs: their events have no times."""
        torch.accelerator.synchronize(self._device)
        found: list[StreamWork] = []
        for stream, what, began, ended in self._events:
            with suppress(RuntimeError):
                seconds = self._first.elapsed_time(began) / 1e3, began.elapsed_time(ended) / 1e3
                found.append(StreamWork(stream, what, *seconds))
        return found
