"""Properties of the types of devices that communication depends on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

_WITHOUT_STREAMS = {"cpu", "mps"}
"""Accelerators whose work is complete when a call returns, or that have one stream only."""


@dataclass(frozen=True, slots=True)
class Platform:
    """Properties of one type of device.

    `has_streams` is True if calls are queued on streams. Otherwise, work is complete when a call returns.
    """

    device_type: str
    has_streams: bool


def platform_of(device: torch.device) -> Platform:
    """Return the properties of the type of this device.

    >>> platform_of(torch.device("cpu"))
    Platform(device_type='cpu', has_streams=False)
    """
    return _platform(device.type)


@lru_cache(16)
def _platform(kind: str) -> Platform:
    accelerator = torch.accelerator.current_accelerator()
    has_streams = accelerator is not None and accelerator.type == kind and kind not in _WITHOUT_STREAMS
    return Platform(kind, has_streams)
