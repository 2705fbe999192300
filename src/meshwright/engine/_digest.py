"""A checksum of all that decides which program a recording gives.

It is computed from the captured call, so whatever Python read in the forward pass and the loss is in it by its effect.
A model that runs code of the user while gradients or updates are recorded has none, nor has one that writes a tensor
which Python holds: what a file holds is another tensor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from meshwright.graph import Capture, meaning_or_none, runs_users_code, writes_outside

from ._description import facts_text
from ._model import Model
from ._setting import torch_state


def checksums(captured: Sequence[Capture]) -> tuple[str, ...]:
    """Return the checksums of the calls that have one."""
    return tuple(each.checksum for each in captured if each.checksum is not None)


def digest_of(captured: Sequence[Capture], how: Any, model: Model) -> str | None:
    """Return the checksum; None where a recording runs code that no checksum tells."""
    optimizer, slots = model.optimizer, captured[0].slots
    hooked = any(slot.tensor._backward_hooks for slot in slots)
    meanings = [meaning_or_none(each.program) for each in captured]
    writes = any(writes_outside(each.program) for each in captured)
    if hooked or writes or None in meanings or (optimizer is not None and runs_users_code(optimizer)):
        return None
    facts = [facts_text(model.network, optimizer), [*torch_state()], how, model.text()]
    text = re.sub(r" at 0x\w+", "", repr(facts))
    return sha256("\n".join([*map(str, meanings), text]).encode()).hexdigest()
