"""The schedule of collectives that programs of devices with streams have by default."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.cost import cluster_of, name_of_device
from meshwright.graph import Pass
from meshwright.layout import device_name, platform_of
from meshwright.passes import InPlace, OverlapSchedule

UNKNOWN = "H100"
"""Device whose prices are used for a device that is not in the hardware table."""


def with_overlap(passes: Sequence[Pass], device: torch.device) -> tuple[Pass, ...]:
    """Return the passes of a user with `OverlapSchedule` for this device, before writes in place.

    There is nothing to add on a device without streams, or if the user has chosen an `OverlapSchedule`.
    """
    chosen = any(isinstance(each, OverlapSchedule) for each in passes)
    if chosen or not platform_of(device).has_streams:
        return tuple(passes)
    at = next((n for n, each in enumerate(passes) if isinstance(each, InPlace)), len(passes))
    return (*passes[:at], OverlapSchedule(cluster_of(_hardware(device))), *passes[at:])


def _hardware(device: torch.device) -> str:
    """Return the name of the device in the hardware table."""
    reported = device_name(device)
    return (reported and name_of_device(reported)) or UNKNOWN
