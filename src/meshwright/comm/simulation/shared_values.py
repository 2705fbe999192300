"""Values in containers that all simulated ranks share, hidden from the ranks that did not make them.

Simulated ranks are threads of one process, so a dict, list or cache of a module is one object for all of them. A part
of a tensor that one rank stores there, such as a cached mask, is a wrong value for the other ranks. So each switch
between ranks hides the watched values that the leaving rank has stored in such containers, and restores those of the
entering rank. Other packages register the watched types, and the function that hides a value.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CellType, FunctionType, ModuleType
from typing import Any
from weakref import ref

from torch import nn

_LOOKED_INTO = 256
"""Upper bound on the entries of a container that are searched.

Longer ones hold results or samples rather than caches.
"""
_COMPARED = 16
"""Upper bound on the entries compared one by one to detect a change.

For more entries, only their number is compared.
"""
_DEPTH = 3
"""Depth of nested containers that are searched; a module inside a module does not count."""
_WATCHED = 1000
"""Upper bound on the containers compared at each switch between ranks."""

_CACHE = type(lru_cache(lambda: None))


@dataclass(frozen=True, slots=True)
class WatchedType:
    """A watched type: `hide(x, rank)` hides a value made by `rank` and returns a function that restores it."""

    kind: type
    hide: Callable[[Any, int], Callable[[], None]]


WATCHED_TYPES: list[WatchedType] = []
"""Registered by the packages whose values are watched."""


def _entries(holder: Any) -> Iterable[Any]:
    """Return the entries of a container, or the attributes of a module; nothing for other values."""
    if isinstance(holder, dict):
        return holder.values()
    if isinstance(holder, nn.Module):
        return vars(holder).values()
    if isinstance(holder, (list, tuple, set, frozenset, deque)):
        return holder
    if isinstance(holder, _CACHE) or _is_link(holder):
        return gc.get_referents(holder)
    return ()


def _first_entries(holder: Any) -> list[Any]:
    entries = _entries(holder)
    return [x for x, _ in zip(entries, range(_LOOKED_INTO), strict=False)]


def _looks_of(holder: Any) -> Any:
    """Return a fingerprint that changes when the container does."""
    if isinstance(holder, _CACHE):
        return holder.cache_info().currsize
    if isinstance(holder, nn.Module):
        return None
    if len(holder) > _COMPARED:
        return len(holder)
    entries = holder.values() if isinstance(holder, dict) else holder
    return (*map(id, entries), *map(type, entries))


class SharedValues:
    """The watched values in shared containers, with the rank that made each."""

    def __init__(self, holders: Iterable[Any]) -> None:
        self._holders: dict[int, Any] = {}
        self._looks: dict[int, Any] = {}
        self._owners: dict[int, tuple[ref[Any], int]] = {}
        self._hidden: dict[int, Callable[[], None]] = {}
        for holder in holders if WATCHED_TYPES else ():
            self._visit(holder, None, 0)

    def _visit(self, holder: Any, rank: int | None, depth: int) -> None:
        if not isinstance(holder, tuple) and not _is_link(holder):
            self._holders[id(holder)] = holder
            self._looks[id(holder)] = _looks_of(holder)
        for x in _first_entries(holder):
            if any(isinstance(x, watch.kind) for watch in WATCHED_TYPES):
                if rank is not None and id(x) not in self._owners:
                    self._owners[id(x)] = ref(x), rank
            elif depth < _DEPTH and _is_container(x) and id(x) not in self._holders and len(self._holders) < _WATCHED:
                self._visit(x, rank, depth + (not isinstance(x, nn.Module)))

    def leave(self, rank: int) -> None:
        """Hide the values that the rank has stored in shared containers."""
        for key, holder in list(self._holders.items()):
            if _looks_of(holder) != self._looks[key]:
                self._visit(holder, rank, 0)
        for key, (found, owner) in list(self._owners.items()):
            x = found()
            if x is None:
                del self._owners[key]
            elif owner == rank and key not in self._hidden:
                hide = next(w.hide for w in WATCHED_TYPES if isinstance(x, w.kind))
                self._hidden[key] = hide(x, owner)

    def enter(self, rank: int | None) -> None:
        """Restore the values that the rank has stored in shared containers; all values if `rank` is None."""
        for key in [k for k in self._hidden if rank is None or self._owners.get(k, (None, rank))[1] == rank]:
            self._hidden.pop(key)()


def _is_link(x: object) -> bool:
    """True for an entry of a cache of limited size."""
    return type(x).__name__ == "_lru_list_elem"


def _is_container(x: object) -> bool:
    return isinstance(x, (dict, list, tuple, set, frozenset, deque, nn.Module, _CACHE)) or _is_link(x)


def containers_below(program: object, is_of_program: Callable[[str], bool]) -> list[Any]:
    """Return the containers that a program shares between ranks: in its modules, their classes and its closures.

    The modules are those of the functions and classes that the globals and closures of `program` lead to.
    """
    found: list[Any] = []
    seen: set[int] = set()
    todo = [program]
    while todo:
        x = todo.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if _is_container(x):
            found.append(x)
        else:
            todo += _below(x, is_of_program)
    return [x for x in found if not isinstance(x, tuple)]


def _below(x: Any, is_of_program: Callable[[str], bool]) -> Iterator[Any]:
    """Yield the values that a function, a class, a module or an object of the program refers to by name."""
    x = getattr(x, "__func__", x)
    if isinstance(x, partial):
        yield from (x.func, *x.args, *x.keywords.values())
    elif isinstance(x, ModuleType):
        yield from vars(x).values() if is_of_program(x.__name__) else ()
    elif isinstance(x, FunctionType):
        yield from (c.cell_contents for c in x.__closure__ or () if c != _EMPTY)
        yield from (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())
        yield sys.modules.get(x.__module__)
    elif isinstance(x, type) and is_of_program(x.__module__):
        yield from (vars(x).values())
        yield sys.modules.get(x.__module__)
    elif not isinstance(x, type) and is_of_program(type(x).__module__) and hasattr(x, "__dict__"):
        yield vars(x)


_EMPTY = CellType()
