"""Graphs of work on a device: recorded once, and queued by one call from then on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


def has_graphs(device: torch.device) -> bool:
    """True if torch can record graphs of work on the device."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or device.type != accelerator.type or not hasattr(torch.accelerator, "Graph"):
        return False
    try:
        torch.accelerator.Graph()
    except RuntimeError:  # the device's package has none
        return False
    return True


class DeviceGraph(Generic[T]):
    """The work that a function queues on the current device, and on streams that wait for it; recorded, but not run.

    The memory that the function allocates belongs to the graph, so each replay has the same addresses. `result` is what
    the function returns; its values are those of the latest replay.
    """

    def __init__(self, work: Callable[[], T], device: torch.device) -> None:
        self._graph = torch.accelerator.Graph(capture_error_mode="thread_local")
        with torch.Stream(device):  # nothing can be recorded on the default stream
            self._graph.capture_begin()
            try:
                self.result = work()
            except BaseException:
                with suppress(RuntimeError):  # the recording may be broken
                    self._graph.capture_end()
                raise
            self._graph.capture_end()

    def replay(self) -> None:
        """Queue the work on the current stream; the host goes on."""
        self._graph.replay()
