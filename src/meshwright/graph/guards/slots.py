"""Slots that hold values read by code: entries of namespaces, contents of containers, cells of closures.

Each slot stores its value at construction. `holds` compares it with the current value, by identity first, which takes
about 40 ns per entry. `changes` yields the differences, and `restore` writes the stored values back.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import repeat
from operator import attrgetter, is_
from types import BuiltinMethodType, CellType, MappingProxyType, MethodType
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from ..torch_hooks import interception_off, no_modes
from .kept_tensors import KeptTensor

MISSING: Any = type("Missing", (), {"__repr__": lambda _: "nothing", "__slots__": ()})()
PLAIN = frozenset(
    {
        *(int, float, complex, str, bytes, bool, type(None), type(Ellipsis), range, slice),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    }
)
"""Immutable types whose values are compared by value."""

Change = tuple[str, object, object]
"""A label, the stored value, and the current value."""


class Slot(Protocol):
    """Protocol of a slot with a stored value."""

    label: str

    def holds(self) -> bool: ...
    def changes(self) -> Iterator[Change]: ...
    def restore(self) -> None: ...
    def values(self) -> Iterator[tuple[object, object]]:
        """Yield the stored values, each with its key."""
        ...

    def put(self, key: Any, value: object) -> None:
        """Set the value for this key, if the slot can be written to."""
        ...


_METHODS = (MethodType, BuiltinMethodType)


def is_plain(value: object) -> bool:
    return type(value) in PLAIN or issubclass(type(value), np.generic)


def same(a: object, b: object) -> bool:
    """True if two values are one object, equal plain values, or tuples or methods of such values."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if kind in PLAIN or issubclass(kind, np.generic):
        return repr(a) == repr(b) if isinstance(a, (float, complex, np.generic)) else a == b
    if isinstance(a, tuple) and isinstance(b, tuple) and (kind is tuple or hasattr(kind, "_fields")):
        return len(a) == len(b) and (all(map(is_, a, b)) or all(map(same, a, b)))
    if kind is frozenset:
        return a == b
    if isinstance(a, KeptTensor) and isinstance(b, KeptTensor):
        return a.label == b.label
    if isinstance(a, _METHODS) and isinstance(b, _METHODS):
        return a.__self__ is b.__self__ and a == b
    return False


class NamespaceSlot:
    """Entries of a namespace by name: of an object, a class, a module, or the globals of a function.

    `counts(key)` is True for new names that code may read. If `counts` is None, new names do not count.
    """

    def __init__(
        self,
        label: str,
        held: Mapping[str, Any],
        keys: Sequence[str],
        counts: Callable[[str], bool] | None,
        owner: object = None,
    ) -> None:
        self.label, self.held, self.counts, self.owner = label, held, counts, owner
        self.keys = tuple(keys)
        self.known = tuple(map(held.get, self.keys, repeat(MISSING)))
        self.all = set(held) if counts is not None else None
        self.kind = type(owner)

    def holds(self) -> bool:
        return next(self.changes(), None) is None

    def changes(self) -> Iterator[Change]:
        for key, old in zip(self.keys, self.known, strict=True):
            new = self.held.get(key, MISSING)
            if new is not old and not same(old, new):
                yield f"{self.label}{key}", old, new
        for key in self._new():
            yield f"{self.label}{key}", MISSING, self.held[key]
        if type(self.owner) is not self.kind:
            yield f"{self.label}__class__", self.kind, type(self.owner)

    def _new(self) -> list[str]:
        """Return the new names that count."""
        counts = self.counts
        if counts is None or self.all is None:
            return []
        return [key for key in self.held.keys() - self.all if counts(key)]

    def restore(self) -> None:
        if type(self.owner) is not self.kind:
            self.owner.__class__ = self.kind
        for key in self._new():
            self.put(key, MISSING)
        for key, old in zip(self.keys, self.known, strict=True):
            if self.held.get(key, MISSING) is not old:
                self.put(key, old)

    def put(self, key: str, value: object) -> None:
        if isinstance(self.owner, type):
            delattr(self.owner, key) if value is MISSING else setattr(self.owner, key, value)
        elif value is MISSING:
            cast(dict[str, Any], self.held).pop(key, None)
        else:
            cast(dict[str, Any], self.held)[key] = value

    def values(self) -> Iterator[tuple[object, object]]:
        return zip(self.keys, self.known, strict=True)


class GetterSlot:
    """A value read by `get(owner)`, such as the content of a cell, defaults of a function, or a `__slots__` member."""

    def __init__(self, label: str, owner: object, get: Callable[[Any], Any]) -> None:
        self.label, self.owner, self.get = label, owner, get
        self.known = self.now()

    def now(self) -> object:
        try:
            return self.get(self.owner)
        except ValueError:  # an empty cell
            return MISSING

    def holds(self) -> bool:
        return same(self.known, self.now())

    def changes(self) -> Iterator[Change]:
        now = self.now()
        if not same(self.known, now):
            yield self.label, self.known, now

    def restore(self) -> None:
        if self.now() is not self.known:
            self.put("", self.known)

    def put(self, key: object, value: object) -> None:
        if isinstance(self.owner, CellType):
            self.owner.cell_contents = value

    def values(self) -> Iterator[tuple[object, object]]:
        yield "", self.known


CELL = attrgetter("cell_contents")
OF_FUNCTION = {kind: attrgetter(kind) for kind in ("__code__", "__defaults__", "__kwdefaults__")}


class ContainerSlot:
    """Content of a list, dict, set, deque or array. The order of an `unordered` dict is ignored.

    The keys of a `numbered` dict are numbers of hooks, which torch counts in the whole process.
    """

    def __init__(self, label: str, value: object, unordered: bool = False, numbered: bool = False) -> None:
        self.label, self.value, self.unordered, self.numbered = label, value, unordered, numbered
        self.known = content(value)

    def holds(self) -> bool:
        return same_content(self.known, content(self.value))

    def changes(self) -> Iterator[Change]:
        now = content(self.value)
        if same_content(self.known, now):
            return
        if not isinstance(self.value, dict):
            yield self.label, self.known, now
            return
        before, after = _stored_dict(self.known), _stored_dict(now)
        if list(before) != list(after) and not (self.unordered and before.keys() == after.keys()):
            yield self.label, list(before), list(after)
        else:
            yield from ((f"{self.label}[{k!r}]", before[k], after[k]) for k in before if not same(before[k], after[k]))

    def restore(self) -> None:
        if not self.holds():
            _refill(self.value, self.known)

    def put(self, key: object, value: object) -> None:
        kinds: tuple[Any, ...] = (OrderedDict, dict, list)
        kind = next((k for k in kinds if isinstance(self.value, k)), None)
        if kind is not None:
            kind.__setitem__(self.value, key, value)  # method of the base class: a user's own method may do more

    def values(self) -> Iterator[tuple[object, object]]:
        known = self.known
        if isinstance(self.value, dict):
            yield from _stored_dict(known).items()
        elif isinstance(known, tuple):
            yield from enumerate(cast("tuple[Any, ...]", known))
        else:
            yield "", known


def _stored_dict(known: tuple[Any, ...]) -> dict[Any, Any]:
    """Return the stored dict for its `content`."""
    half = len(known) // 2
    return dict(zip(known[:half], known[half:], strict=True))


def content(value: Any) -> Any:
    """Return the current content of a container as an immutable value."""
    if isinstance(value, dict):
        kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        return (*kind.keys(value), *kind.values(value))
    if isinstance(value, list):
        return tuple(list.__iter__(cast(list[Any], value)))
    if isinstance(value, deque):
        return tuple(cast(deque[Any], value))
    if isinstance(value, Set):
        return frozenset(cast(Set[Any], value))
    if isinstance(value, np.ndarray):
        return value.copy() if value.dtype != object else tuple(value.reshape(-1).tolist())
    if isinstance(value, Tensor):
        with no_modes(), interception_off():
            return bytes(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return bytes(value)


def same_content(a: object, b: object) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and (all(map(is_, a, b)) or all(map(same, a, b)))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        alike = a.shape == b.shape and a.dtype == b.dtype
        return alike and a.tobytes() == b.tobytes()
    return type(a) is type(b) and bool(a == b)


_BUFFERS = (memoryview, ctypes.Structure, ctypes.Union, ctypes.Array, ctypes._SimpleCData)  # pyright: ignore[reportPrivateUsage] - the base of c_int


def is_container(value: object) -> bool:
    """True for containers that `ContainerSlot` can compare."""
    if isinstance(value, (tuple, frozenset, MappingProxyType)):
        return False
    return isinstance(value, (dict, list, set, deque, np.ndarray, bytearray, array, *_BUFFERS))


def _refill(value: Any, known: Any) -> None:
    """Write the stored content back into a container."""
    if isinstance(value, dict):
        kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        kind.clear(value)  # method of the base class: a user's own method may do more
        for key, item in _stored_dict(known).items():
            kind.__setitem__(value, key, item)
    elif isinstance(value, list):
        list.__setitem__(cast(list[Any], value), slice(None), list(known))
    elif isinstance(value, (set, deque)):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(known)
    elif isinstance(value, np.ndarray) and isinstance(known, np.ndarray):
        value[...] = known
    elif isinstance(value, (bytearray, array)):
        held: Any = value
        held[:] = bytearray(known) if isinstance(value, bytearray) else array(value.typecode, known)
