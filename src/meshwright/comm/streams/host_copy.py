"""Copies from a device to the host that leave the host free, for messages that a thread sends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.layout import CPU, platform_of

from .communication_streams import CommunicationStreams


def begin_host_copy(x: Tensor, streams: CommunicationStreams, name: str) -> tuple[Tensor, Callable[[], None]]:
    """Queue a copy of a contiguous tensor to the host on the stream `name`.

    Returns:
        The copy, and a function that waits until the copy has its values. `x` may be written to at once.
    """
    host = torch.empty(x.shape, dtype=x.dtype, device=CPU, pin_memory=platform_of(x.device).pins_memory)
    with streams.between_waits(x.device, name, "a copy to the host"):
        host.copy_(x, non_blocking=True)
        copied = torch.accelerator.current_stream(x.device).record_event()
    return host, copied.synchronize
