"""Choose the transport and the device of a process."""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshwright.layout import Transport, TransportGroup, device_types, platform_of

from .._errors import LaunchError
from ..torch_hooks import backend_for

CPU_BACKEND = "gloo"


Opener = Callable[[TransportGroup], Transport]
"""Function of a platform that opens a transport between the devices of a group."""


def default_transport() -> str | Opener:
    """Return the transport of the accelerator's platform: its function, or the name of a backend of torch."""
    kind = device_types()[-1]
    return platform_of(kind).transport or backend_for(kind) or CPU_BACKEND


def use_device(local_rank: int, may_share: bool = False) -> None:
    """Make the device of this process the current one: that of its local rank, or the only one that it can see.

    Raises LaunchError if the process can see several devices, and its local rank is none of them. If processes
    `may_share` a device, local ranks get the devices in turn.
    """
    count = torch.accelerator.device_count()
    if count <= 1:
        return
    if local_rank < count or may_share:
        torch.accelerator.set_device_index(local_rank % count)
        return
    kind = device_types()[-1]
    raise LaunchError(
        f"a device for local rank {local_rank}",
        f"{count} devices of type {kind} on this host",
        "each process of a host uses a device of its own",
        f"start at most {count} processes on this host, set LOCAL_RANK to a number below {count}, or let processes "
        'share devices: mw.init_process(backend="gloo")',
    )
