"""The first values of tensors that are parts of whole ones: a checksum of the whole, as long as nobody writes.

Each rank lays a whole tensor of its own and keeps a part. If the ranks had other values, their parts do not belong
together, and nothing that compares replicas can tell. But they may be written over, as the load of a checkpoint does:
so the values are no part of what a tensor's number is made of (`_identity.py`), and are compared before the first
update.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._writes import writes_to
from .torch_hooks import no_interception

_KEY = "_meshwright_first"


def note_first(part: Tensor, held: int) -> None:
    """Remember for the memory of a part the checksum of the whole tensor."""
    writes = writes_to(part)
    with no_interception():
        storage: Any = part.untyped_storage()
        storage.__dict__[_KEY] = held, writes


def first_of(part: Tensor) -> int | None:
    """Return the checksum of the whole tensor of which this is a part; None if there is none, or after a write."""
    with no_interception():
        storage: Any = part.untyped_storage()
        found = storage.__dict__.get(_KEY)
    return found[0] if found is not None and found[1] == writes_to(part) else None
