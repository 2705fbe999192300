"""Messages that a thread receives while the host goes on; a stream of the device waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue

import torch
from torch import Tensor

from meshwright.layout import CPU, HostSignal

from .._errors import CommError
from ..streams.communication_streams import CommunicationStreams

_NOT_A_NUMBER = 0xFF
"""Byte of memory for a message that does not come: NaN in every floating-point type."""


class LateMessages:
    """The messages from one rank to one device, in the order in which they are received.

    `fail` gets the error of a message that does not come, and the stream goes on with NaN.
    """

    def __init__(
        self,
        peer: int,
        device: torch.device,
        signal: HostSignal,
        streams: CommunicationStreams,
        fail: Callable[[CommError], None],
    ) -> None:
        self.device = device
        self._name = f"messages from {peer}"
        self._signal, self._streams, self._fail = signal, streams, fail
        self._count = 0
        self._awaited: Queue[Callable[[], None]] = Queue()
        threading.Thread(target=self._run, name=f"meshwright late {self._name}", daemon=True).start()

    def queue(self, out: Tensor, fetch: Callable[[], Tensor]) -> None:
        """Queue a copy of a message to `out`, which the current stream has allocated; that stream waits for the copy.

        A thread calls `fetch`, which waits for the message and returns its bytes.
        """
        self._count += 1
        number = self._count
        host = torch.empty(out.numel() * out.itemsize, dtype=torch.uint8, device=CPU, pin_memory=True)
        self._awaited.put(lambda: self._arrive(host, fetch, number))
        with self._streams.between_waits(self.device, self._name, "receive"):
            self._signal.wait(torch.accelerator.current_stream(self.device), number)
            out.view(-1).view(torch.uint8).copy_(host, non_blocking=True)

    def drain(self) -> None:
        """Wait until the thread has received all messages, or has failed to."""
        self._awaited.join()

    def _run(self) -> None:
        while True:
            self._awaited.get()()
            self._awaited.task_done()

    def _arrive(self, host: Tensor, fetch: Callable[[], Tensor], number: int) -> None:
        try:
            host.copy_(fetch())
        except Exception as error:
            host.fill_(_NOT_A_NUMBER)
            self._fail(error if isinstance(error, CommError) else self._unexpected(error))
        self._signal.reach(number)

    def _unexpected(self, error: Exception) -> CommError:
        return CommError(
            f"the {self._name}",
            f"{type(error).__name__}: {error}",
            "the thread that receives them cannot go on without this message",
            "read the output of the other ranks, and restart the run",
        )
