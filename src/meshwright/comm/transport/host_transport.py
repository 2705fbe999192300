"""Transport of tensors on a device through the memory of the host, for devices without a transport of their own.

It also serves several processes that share one device, which NCCL refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.layout import PlacedMessage, Transport

from .shared_memory import contiguous_values


class HostTransport:
    """Transport of one group of ranks: copies operands to the host and results back; complete when a call returns."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.barrier = transport.barrier

    def all_reduce(self, out: Tensor, x: Tensor, op: str) -> None:
        """Write the reduction of every rank's `x` to `out`."""
        host = x.cpu()
        self._transport.all_reduce(host, host, op)
        out.copy_(host)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Write every rank's flat `x` to `out`, one after the other."""
        host = _host_memory(out)
        self._transport.all_gather(host, x.cpu())
        out.copy_(host)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        """Write the sum over the group of the caller's part of the flat `x` to `out`."""
        host = _host_memory(out)
        self._transport.reduce_scatter(host, x.cpu())
        out.copy_(host)

    def all_to_all(self, out: Tensor, x: Tensor, arriving: list[int], leaving: list[int]) -> None:
        """Write every rank's piece for the caller to `out`, flat, with the given lengths."""
        host = _host_memory(out)
        self._transport.all_to_all(host, x.cpu(), arriving, leaving)
        out.copy_(host)

    def broadcast(self, x: Tensor, place: int) -> None:
        """Write the `x` of the rank at this place to every rank's `x`."""
        host = x.cpu()
        self._transport.broadcast(host, place)
        x.copy_(host)

    def exchange(self, sends: Sequence[PlacedMessage], receives: Sequence[PlacedMessage]) -> None:
        """Send and receive all messages together, and wait for them."""
        arriving = [(place, tag, _host_memory(out)) for place, tag, out in receives]
        self._transport.exchange([(place, tag, contiguous_values(x.cpu())) for place, tag, x in sends], arriving)
        for (*_, out), (*_, host) in zip(receives, arriving, strict=True):
            out.copy_(host)


def _host_memory(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")
