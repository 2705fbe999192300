"""The first values of tensors that are parts of whole ones: a checksum of the whole, valid until the first write.

Each rank distributes its own whole tensor and keeps a part. If the ranks had different values, their parts do not
match, and no comparison of replicas can detect this. But the values may be overwritten, as when a checkpoint is loaded.
So they do not count in a tensor's number (`computation_numbers.py`), and are compared before the first update.
"""

from __future__ import annotations

from torch import Tensor

from ..torch_hooks import no_interception
from .write_counts import writes_to

_KEY = "_meshwright_first"


def note_initial_checksum(part: Tensor, held: int) -> None:
    """Store the checksum of the whole tensor for the memory of a part."""
    writes = writes_to(part)
    with no_interception():
        storage = part.untyped_storage()
        storage.__dict__[_KEY] = held, writes


def initial_checksum_of(part: Tensor) -> int | None:
    """Return the checksum of the whole tensor of which this is a part; None if there is none, or after a write."""
    with no_interception():
        storage = part.untyped_storage()
        found = storage.__dict__.get(_KEY)
    return found[0] if found is not None and found[1] == writes_to(part) else None
