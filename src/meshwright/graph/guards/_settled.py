"""What the first call of a model changes and no later one, such as `config.problem_type` in transformers.

A program is recorded of the second call then. A process that loads the program makes the changes, as its own first call
would have done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import nn

from ._slots import MISSING, Names, Slot, same

_JSON = (str, int, float, bool, type(None))


class Before:
    """The attributes of layers, and of objects that layers hold, such as their `config`, before a first call."""

    def __init__(self, roots: Iterable[Any]) -> None:
        owners = [part for root in roots for part in (root.modules() if isinstance(root, nn.Module) else (root,))]
        held = [value for owner in owners for value in _attributes(owner).values()]
        self.known = {id(found): dict(found) for found in map(_attributes, (*owners, *held))}

    def settled(self, slots: Iterable[Slot]) -> list[Any]:
        """Return as JSON data what the slots hold and did not before: paths, names, values before and now."""
        found = [slot for slot in slots if isinstance(slot, Names) and slot.path and id(slot.held) in self.known]
        return [
            [[list(step) for step in slot.path], key, *pair]
            for slot in found
            for key, now in slot.values()
            if (pair := _as_data(self.known[id(slot.held)].get(key, MISSING), now)) is not None
        ]


def _attributes(value: Any) -> dict[str, Any]:
    found = getattr(value, "__dict__", None) if not isinstance(value, (type, ModuleType)) else None
    return found if type(found) is dict else {}


def _as_data(before: Any, now: Any) -> list[Any] | None:
    """Return two values that differ, the first one in a list that is empty for a name that was not there.

    None for values that are the same, or that JSON has no form for.
    """
    if before is now or same(before, now):
        return None
    values = [*([] if before is MISSING else [before]), now]
    if not all(type(v) in _JSON and not (isinstance(v, float) and not math.isfinite(v)) for v in values):
        return None
    return [values[:-1], now]


def settle(data: Sequence[Any], roots: Mapping[str, Any], find: Callable[..., Any]) -> Callable[[], None]:
    """Make the changes that were not made yet, and return what undoes them; `find(path, roots)` returns an object."""
    undo: list[tuple[dict[str, Any], str, list[Any]]] = []
    for steps, key, before, now in data:
        try:
            held = vars(find(tuple((step, name) for step, name in steps), roots))
        except (LookupError, AttributeError, TypeError, ValueError):
            continue
        if ([held[key]] if key in held else []) == before:
            undo.append((held, key, before))
            held[key] = now
    return lambda: _undo(undo)


def _undo(changes: list[tuple[dict[str, Any], str, list[Any]]]) -> None:
    for held, key, before in reversed(changes):
        if before:
            held[key] = before[0]
        else:
            held.pop(key, None)
