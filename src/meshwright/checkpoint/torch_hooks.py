"""The private torch names that this room needs, each with the reason."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def dcp_classes() -> tuple[ModuleType, Any]:
    """The module with the classes that torch's distributed checkpoints are described by, and `_StorageInfo`.

    That one says where the bytes of a tensor are; torch's reader wants this very class. Both take seconds to import.
    """
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return metadata, _StorageInfo
