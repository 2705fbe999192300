"""The private names of torch that this package needs, each with the reason."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def dcp_classes() -> tuple[ModuleType, Any]:
    """Return the module with the classes of torch's metadata of distributed checkpoints, and the class `_StorageInfo`.

    `_StorageInfo` has the position of a tensor's bytes; torch's reader needs this very class. Both take seconds to
    import.
    """
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return metadata, _StorageInfo
