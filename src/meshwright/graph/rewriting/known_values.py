"""Computation of values that depend on no input, such as masks, positions and tables of constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..program.draft import Draft
from ..program.effects import is_pure
from ..program.node import map_values
from ..torch_hooks import Operator, no_modes
from .node_reader import VirtualValue

LARGEST = 2**26
"""Maximum number of elements of a computed value."""


def known_tensor(draft: Draft, v: Any) -> Tensor | None:
    """Return the tensor that `v` is on every run, on the CPU; None if it depends on an input or is too large."""
    written = {x for x, _ in draft.program.writes}
    given = (g for g in draft.program.inputs if g.value not in written and type(g.source) is Tensor)
    found: dict[Any, Any] = {g.value: g.source for g in given}
    with no_modes(), torch.no_grad():
        out = _computed(draft, v, found)
    return out if isinstance(out, Tensor) else None


def _computed(draft: Draft, v: Any, found: dict[Any, Any]) -> Any:
    if v in found:
        return found[v]
    found[v] = None
    if isinstance(v, VirtualValue):
        call: Any = v
        kwargs: dict[str, Any] = {}
    else:
        call = draft.producer(v)
        kwargs = {} if call is None else call.kwargs
    if call is None or not isinstance(call.op, Operator) or not is_pure(call.op) or not _is_small(v):
        return None
    known = True

    def tensor(x: Any) -> Any:
        nonlocal known
        value = _computed(draft, x, found)
        known = known and value is not None
        return value

    args = tuple(tensor(a) if isinstance(a, VirtualValue) else a for a in call.args)
    args, kwargs = map_values(tensor, (args, kwargs))
    if known:
        out = call.op(*args, **{k: torch.device("cpu") if k == "device" else a for k, a in kwargs.items()})
        found[v] = out if isinstance(v, VirtualValue) or call.out is v else out[call.outs.index(v)]
    return found[v]


def _is_small(v: Any) -> bool:
    size = 1
    for n in v.shape:
        if not isinstance(n, int):
            return False
        size *= n
    return size <= LARGEST
