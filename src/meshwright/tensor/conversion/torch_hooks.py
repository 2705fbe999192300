"""The private torch names that this package needs, each with the reason."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getclosurevars, unwrap
from types import CodeType
from typing import Any

import torch
from torch.utils.checkpoint import _checkpoint_hook, _recomputation_hook

_top_saved_hooks: Callable[[bool], tuple[Any, Any] | None]
_top_saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue] - not in its stubs


def _codes(hook: type) -> set[object]:
    """Return the codes of the functions that the constructor of `hook` makes."""
    return {code for code in hook.__init__.__code__.co_consts if isinstance(code, CodeType)}


_FORWARD = _codes(_checkpoint_hook)
"""Codes of the hooks of `torch.utils.checkpoint` in the forward pass; `_checkpoint_hook` has the call as `frame`."""

_AGAIN = _codes(_recomputation_hook)
"""Codes of its hooks while a call runs again; `_recomputation_hook` has a reference to the call."""


def checkpointed_call() -> tuple[object, object] | None:
    """Return the innermost checkpointed call that runs, and the number of the backward pass in which it runs again.

    The number is None in the forward pass. None without such a call, or if it is reentrant. `torch.utils.checkpoint`
    tells this to nobody but the hooks that it sets.
    """
    top = _top_saved_hooks(True)
    if top is None:
        return None
    pack = unwrap(top[0])
    code = getattr(pack, "__code__", None)
    if code in _FORWARD:
        return getclosurevars(pack).nonlocals["frame"], None
    if code in _AGAIN:
        held = getclosurevars(pack).nonlocals
        return held["target_frame_ref"](), held["gid"]
    return None
