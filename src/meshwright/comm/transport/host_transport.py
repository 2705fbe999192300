"""Transport of tensors on a device through the memory of the host, for devices without a transport of their own.

It also serves several processes that share one device, which NCCL refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .shared_memory import contiguous_values

Messages = Sequence[tuple[int, int, Tensor]]
"""(place in the group, tag, tensor) of each message."""


class CpuTransport(Protocol):
    """Collectives of tensors on the CPU."""

    def reduces(self, op: str, dtype: torch.dtype) -> bool: ...
    def all_reduce(self, x: Tensor, op: str, over: bool = False) -> Tensor: ...
    def all_gather(self, out: Tensor, x: Tensor) -> None: ...
    def reduce_scatter(self, out: Tensor, x: Tensor) -> None: ...
    def all_to_all(self, out: Tensor, x: Tensor, arriving: list[int], leaving: list[int]) -> None: ...
    def messages(self, sends: Messages, receives: Messages) -> None: ...
    def barrier(self) -> None: ...


class HostTransport:
    """Transport of one group of ranks: copies operands to the host and results back; complete when a call returns."""

    def __init__(self, transport: CpuTransport) -> None:
        self._transport = transport
        self.reduces, self.barrier = transport.reduces, transport.barrier

    def all_reduce(self, x: Tensor, op: str, over: bool = False) -> Tensor:
        """Return the sum, prod, max or min of every rank's `x`; with `over`, in the memory of `x`."""
        found = self._transport.all_reduce(x.cpu(), op, over=True)
        return x.copy_(found) if over else found.to(x.device)

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

    def messages(self, sends: Messages, receives: Messages) -> None:
        """Post all messages together, and wait for them."""
        arriving = [(place, tag, _host_memory(out)) for place, tag, out in receives]
        self._transport.messages([(place, tag, contiguous_values(x.cpu())) for place, tag, x in sends], arriving)
        for (*_, out), (*_, host) in zip(receives, arriving, strict=True):
            out.copy_(host)


def _host_memory(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")
