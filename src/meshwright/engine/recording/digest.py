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
from meshwright.layout import device_types

from .recorded_model import RecordedModel
from .setting import torch_state
from .setting_text import facts_text


def checksums(captured: Sequence[Capture]) -> tuple[str, ...]:
    """Return the checksums of the calls that have one."""
    return tuple(each.checksum for each in captured if each.checksum is not None)


def digest_of(captured: Sequence[Capture], how: object, model: RecordedModel) -> str | None:
    """Return the checksum, or None if a recording runs code that no checksum covers.

    The programs of ranks on different devices of a type differ in the index of the device only. Their checksums have
    the same `common_part`.
    """
    optimizer, slots = model.optimizer, captured[0].slots
    hooked = any(slot.tensor._backward_hooks for slot in slots)
    meanings = [canonical_text_or_none(each.program) for each in captured]
    writes = any(writes_external_tensors(each.program) for each in captured)
    if hooked or writes or None in meanings or (optimizer is not None and runs_users_code(optimizer)):
        return None
    facts = [facts_text(model.network, optimizer), [*torch_state()], how, model.text()]
    text = re.sub(r" at 0x\w+", "", repr(facts))
    whole = "\n".join([*map(str, meanings), text])
    common = _without_device_indices(whole)
    found = sha256(common.encode()).hexdigest()
    return found if common == whole else f"{found} {sha256(whole.encode()).hexdigest()}"


def common_part(digest: str | None) -> str | None:
    """Return the part of a checksum that is equal on all ranks that run the same program, each on its own device.

    >>> common_part("12ab 34cd"), common_part("12ab"), common_part(None)
    ('12ab', '12ab', None)
    """
    return None if digest is None else digest.partition(" ")[0]


def _without_device_indices(text: str) -> str:
    """Return the text with `cuda` in place of `cuda:1`, and of the same device as Python writes it."""
    for kind in device_types()[1:]:
        text = re.sub(rf"\b{kind}(:\d+|', index=\d+)", kind, text)
    return text
