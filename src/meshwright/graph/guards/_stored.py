"""Guards as data in a file, and back: each place by the way to it from the roots, its values as a checksum."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import nn

from meshwright.tensor import local_parts

from ._describe import described
from ._guards import Guards
from ._kinds import slot_of, variables_named
from ._reach import LAYER_HOOKS, any_name, counting_for
from ._settled import settle
from ._slots import CELL, OF_FUNCTION, Content, Names, Path, Read, Slot, is_plain
from ._trusted import is_trusted_module

_TENSORS = ("_parameters", "_buffers")
"""Tables of tensors, which programs take as inputs: how they lie is compared apart."""
_READS: dict[str, Callable[[Any], Any]] = {"cell": CELL, **OF_FUNCTION}


@dataclass(frozen=True, slots=True)
class Counted:
    """The names that new attributes count by, as `Reach.counts` knows them."""

    names: frozenset[str]
    parts: tuple[str, ...]

    def __call__(self, key: str) -> bool:
        return key in self.names or any(part in key for part in self.parts)


def stored(guards: Guards, roots: Mapping[str, Any]) -> dict[str, Any]:
    """Return the guards as JSON data. Places that no way leads to (elements of sets, hooks) are left out."""
    with local_parts(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated objects warn when they are looked at
        rows = [row for slot in guards.slots for row in [_row(slot)] if row is not None and _leads_to(slot, roots)]
    return {
        "names": sorted(guards.names),
        "parts": sorted(guards.parts),
        "settled": list(guards.settled),
        "places": rows,
    }


def _leads_to(slot: Slot, roots: Mapping[str, Any]) -> bool:
    """True if the path of a place leads to it."""
    is_read = isinstance(slot, Read)
    try:
        found = _found(slot.path[:-1] if is_read else slot.path, roots)
        if isinstance(slot, Names):
            return vars(found) is slot.held or isinstance(found, type)
        if isinstance(slot, Content):
            return found is slot.value
        if isinstance(slot, Read) and slot.get is variables_named:
            return True
        at: Any = slot.path[-1][1]
        return isinstance(slot, Read) and (found.__closure__[at] if slot.get is CELL else found) is slot.owner
    except (LookupError, AttributeError, TypeError, ValueError):
        return False


def _row(slot: Slot) -> list[Any] | None:
    """Return a place as data; None for one without a path, and for tensors, which are compared apart."""
    if not slot.path or slot.path[-1][1] in _TENSORS:
        return None
    if not all(isinstance(key, (str, int)) for _, key in slot.path):
        return None
    path = [list(step) for step in slot.path]
    if isinstance(slot, Names):
        told = {key: value for key, value in slot.values() if not _is_of_library(slot) or _is_told(value)}
        open_to = "none" if slot.counts is None else "any" if slot.counts is any_name else "named"
        return ["names", slot.label, path, list(told), open_to, _checksum(told.values())]
    if isinstance(slot, Content):
        return ["content", slot.label, path, [], str(slot.unordered), _checksum(_known(slot))]
    if isinstance(slot, Read) and slot.get is variables_named:
        return ["environment", slot.label, path, list(slot.owner), "", _checksum([slot.known])]
    if isinstance(slot, Read):
        kind = next((name for name, get in _READS.items() if get is slot.get), None)
        return None if kind is None else ["read", slot.label, path, [], kind, _checksum([slot.known])]
    return None


def _is_of_library(slot: Names) -> bool:
    """True for a module or class of a trusted library, which holds tables that differ between processes."""
    kind, name = slot.path[-1]
    return kind in ("module", "class") and is_trusted_module(str(name).partition(":")[0])


def _is_told(value: Any) -> bool:
    """True for a plain value or a function, whose description is the same in each process."""
    return is_plain(value) or type(value) in (FunctionType, BuiltinFunctionType, type(None))


def _known(slot: Any) -> Iterable[Any]:
    """Return the remembered values; of hooks without their numbers, which torch gives out in each process."""
    if isinstance(slot, Names):
        return slot.known
    is_hooks = isinstance(slot, Content) and slot.path[-1][1] in LAYER_HOOKS
    return slot.known[len(slot.known) // 2 :] if is_hooks else [slot.known]


def _checksum(values: Iterable[Any]) -> str:
    return sha256("\n".join(map(described, values)).encode()).hexdigest()[:16]


def restored(data: Mapping[str, Any], roots: Mapping[str, Any]) -> Guards | None:
    """Return the guards if every place holds what it held when they were stored, else None.

    What only the first call changes is changed now, if no call was made yet.
    """
    counts = Counted(frozenset(data["names"]), tuple(data["parts"]))
    slots: list[Slot] = []
    with local_parts(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated objects warn when they are looked at
        undo = settle(data["settled"], roots, _found)
        for row in data["places"]:
            slot = _slot(row, roots, counts)
            if slot is None:
                undo()
                return None
            slots.append(slot)
    return Guards(slots, counts.names, frozenset(counts.parts), data["settled"])


def _slot(row: Sequence[Any], roots: Mapping[str, Any], counts: Counted) -> Slot | None:
    """Return the place of a row if it is there and holds the same."""
    kind, label, steps, keys, how, checksum = row
    path: Path = tuple((step, key) for step, key in steps)
    try:
        if kind == "read" and how == "cell":
            owner = _found(path[:-1], roots).__closure__[path[-1][1]]
        else:
            owner = _found(path[:-1] if kind == "read" else path, roots)
        slot = _made(kind, label, path, keys, how, owner, counts)
    except (LookupError, AttributeError, TypeError, ValueError):
        return None
    return slot if _checksum(_known(slot)) == checksum else None


def _made(kind: str, label: str, path: Path, keys: list[str], how: str, owner: Any, counts: Counted) -> Any:
    if kind == "environment":
        return Read(label, path, tuple(keys), variables_named)
    if kind == "content":
        return Content(label, path, owner, how == "True")
    if kind == "read":
        return Read(label, path, owner, _READS[how])
    new = None if how == "none" else counting_for(owner, any_name if how == "any" else counts)
    return Names(label, path, vars(owner), keys, new, owner)


def _found(path: Path, roots: Mapping[str, Any]) -> Any:
    """Return the value at the end of a path, without running code of the user or importing a module."""
    value: Any = None
    for kind, key in path:
        value = _step(kind, key, value, roots)
    return value


def _step(kind: str, key: Any, value: Any, roots: Mapping[str, Any]) -> Any:
    match kind:
        case "module":
            return sys.modules[key]
        case "class":
            return _class(key)
        case "part":
            return value._modules[key]
        case "item":
            return value[key] if isinstance(value, (dict, list, tuple)) else None
        case "cell":
            return value.__closure__[key].cell_contents
        case "slot":
            return slot_of(next(vars(c)[key] for c in type(value).__mro__ if key in vars(c)), value)
        case "attribute":
            return _attribute(key, value)
        case _:
            return roots[kind]


def _attribute(key: str, value: Any) -> Any:
    if isinstance(value, (type, ModuleType, nn.Module)) or key in getattr(value, "__dict__", {}):
        return vars(value)[key]
    return getattr(value, key)  # of a function, a method or a property


def _class(name: str) -> type:
    module, _, path = name.partition(":")
    value: Any = sys.modules[module]
    for part in path.split("."):
        value = vars(value)[part]
    return value
