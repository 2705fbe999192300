"""Communication streams of a rank, and waits between streams.

Memory goes back to a stream only after that stream was made to wait for every other stream that used it. So no
allocator needs to know a second stream, and the peak of memory is the same in each run.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from .stream_times import StreamTimes

COLLECTIVES = "collectives"
"""Name of the stream of all collectives. One stream gives them the same order on all ranks."""
_HIGH_PRIORITY = -1


def wait(stream: torch.Stream, event: torch.Event, where: str) -> None:
    """Make the stream wait for the event; the host goes on. `where` names the wait in tests, which leave it out."""
    stream.wait_event(event)


class CommunicationStreams:
    """The communication streams of one rank, made when they are first used."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], torch.Stream] = {}
        self.times: StreamTimes | None = None
        """The times of the work on these streams, while a trace asks for them."""

    def stream(self, device: torch.device, name: str = COLLECTIVES) -> torch.Stream:
        """Return the stream of this name on the device."""
        found = self._streams.get((device, name))
        if found is None:
            found = self._streams[device, name] = torch.Stream(device, priority=_HIGH_PRIORITY)
        return found

    @contextmanager
    def after_current(self, device: torch.device, name: str, where: str) -> Generator[torch.Event]:
        """Run the block on the stream `name`, behind what is queued on the current stream.

        The event is recorded at the end of the block. The caller must make the current stream wait for it, before that
        stream reads results of the block or frees its operands.
        """
        here, side = torch.accelerator.current_stream(device), self.stream(device, name)
        wait(side, here.record_event(), f"operands of {where}")
        done, times = torch.Event(device), self.times
        try:
            with side:
                began = None if times is None else times.begin()
                yield done
                if times is not None and began is not None:
                    times.end(name, where, began)
        except BaseException:
            side.record_event(done)
            wait(here, done, f"error in {where}")
            raise
        side.record_event(done)

    @contextmanager
    def between_waits(self, device: torch.device, name: str, where: str) -> Generator[None]:
        """Run the block on the stream `name`, after the current stream and before its next work.

        If `name` is the current stream, nothing waits.
        """
        here = torch.accelerator.current_stream(device)
        if here == self.stream(device, name):
            yield
            return
        with self.after_current(device, name, where) as done:
            yield
        wait(here, done, f"results of {where}")
