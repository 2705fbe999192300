"""A simulated slow network: results arrive late, and waiting for them leaves the processor free.

On a machine without accelerators, communication and computation share the cores, so they cannot overlap. With this
communicator a conversion is complete no earlier than `latency + bytes / bandwidth` seconds after its start. Conversions
follow one another as on one link. So a schedule hides the time that it would hide on a real network. A message is
complete that long after it was sent, no matter when it is received.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from meshwright.reshard import ConversionPlan

from .call import CommCall, message_call, received_bytes
from .communicator import Communicator, FinishedConversion, PendingConversion, Receive

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Late:
    """A conversion whose result is available from a time of the monotonic clock on."""

    part: Tensor
    due: float

    def wait(self) -> Tensor:
        _sleep_until(self.due)
        return self.part


class DelayedCommunicator(Communicator):
    """Communicator `inner` with delays: `latency` in seconds per call, `bandwidth` in bytes per second.

    Each message is followed by a second one with the time from which the first is available. That time is on the clock
    that all ranks of a machine share.
    """

    kind = "delayed"

    def __init__(self, inner: Communicator, latency: float, bandwidth: float) -> None:
        super().__init__(inner.rank, inner.size)
        self.inner, self.latency, self.bandwidth = inner, latency, bandwidth
        self.seen = inner.seen
        self._free = 0.0

    def start(self, way: ConversionPlan, x: Tensor) -> PendingConversion:
        began = time.monotonic()
        out = self.inner.convert(way, x)
        return _Late(out, self._due(began, way.received(self.rank))) if way.rounds else FinishedConversion(out)

    def _due(self, began: float, nbytes: float) -> float:
        """Return the time at which the link has carried another call that began at `began`."""
        self._free = max(began, self._free) + self.latency + nbytes / self.bandwidth
        return self._free

    def _late(self, call: CommCall, carry: Callable[[], T]) -> T:
        began = time.monotonic()
        out = carry()
        _sleep_until(self._due(began, received_bytes(call, self.rank)))
        return out

    def _all_reduce(self, x: Tensor, call: CommCall) -> Tensor:
        return self._late(call, lambda: self.inner._all_reduce(x, call))

    def _all_reduce_over(self, x: Tensor, call: CommCall) -> Tensor:
        return self._late(call, lambda: self.inner._all_reduce_over(x, call))

    def _all_gather(self, x: Tensor, call: CommCall) -> list[Tensor]:
        return self._late(call, lambda: self.inner._all_gather(x, call))

    def _reduce_scatter(self, pieces: Sequence[Tensor], call: CommCall) -> Tensor:
        return self._late(call, lambda: self.inner._reduce_scatter(pieces, call))

    def _all_to_all(self, pieces: Sequence[Tensor], call: CommCall) -> list[Tensor]:
        return self._late(call, lambda: self.inner._all_to_all(pieces, call))

    def _exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Receive], call: CommCall
    ) -> list[Tensor]:
        return self._late(call, lambda: self.inner._exchange(sends, receives, call))

    def _send(self, x: Tensor, call: CommCall) -> None:
        """Send the message; the link is free once the message has left, and the message arrives `latency` later."""
        self._free = max(time.monotonic(), self._free) + x.nbytes / self.bandwidth
        due = torch.tensor(self._free + self.latency, dtype=torch.float64, device="cpu")
        self.inner._send(x, call)
        self.inner._send(due, self._due_call(call))

    def _receive(self, call: CommCall, device: torch.device) -> Tensor:
        x = self.inner._receive(call, device)
        due = self.inner._receive(self._due_call(call), torch.device("cpu"))
        _sleep_until(due.item())
        return x

    def _due_call(self, call: CommCall) -> CommCall:
        return message_call(call.kind, self.rank, call.message[0], call.tag, (), torch.float64)

    def _barrier(self, call: CommCall) -> None:
        self._late(call, lambda: self.inner._barrier(call))


def _sleep_until(due: float) -> None:
    while (left := due - time.monotonic()) > 0:
        time.sleep(left)
