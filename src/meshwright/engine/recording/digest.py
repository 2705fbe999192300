"""Checksum of everything that determines the program of a recording.

The checksum is computed from the captured call, so it includes the effect of everything that Python read in the forward
pass and the loss. A model has no checksum if it runs the user's code while gradients or updates are recorded. A model
that writes to a tensor which Python holds has none either: a file would hold another tensor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256

from meshwright.graph import Capture, canonical_text_or_none, runs_users_code, writes_external_tensors

from .recorded_model import RecordedModel
from .setting import torch_state
from .setting_text import facts_text


def checksums(captured: Sequence[Capture]) -> tuple[str, ...]:
    """Return the checksums of the calls that have one."""
    return tuple(each.checksum for each in captured if each.checksum is not None)


def digest_of(captured: Sequence[Capture], how: object, model: RecordedModel) -> str | None:
    """Return the checksum, or None if a recording runs code that no checksum covers."""
    optimizer, slots = model.optimizer, captured[0].slots
    hooked = any(slot.tensor._backward_hooks for slot in slots)
    meanings = [canonical_text_or_none(each.program) for each in captured]
    writes = any(writes_external_tensors(each.program) for each in captured)
    if hooked or writes or None in meanings or (optimizer is not None and runs_users_code(optimizer)):
        return None
    facts = [facts_text(model.network, optimizer), [*torch_state()], how, model.text()]
    text = re.sub(r" at 0x\w+", "", repr(facts))
    return sha256("\n".join([*map(str, meanings), text]).encode()).hexdigest()
