"""Two objects that are alike wherever the code that ran can read: what it did for one, it does for the other.

`Reach` walks from both in the same order, so places are compared in pairs. Two places are alike if they hold one
object, equal plain values, or a pair of objects of one class whose own places are alike. An object whose state the
places do not tell whole is like no other: a tensor that is no parameter, a generator of random numbers, state in C.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from types import BuiltinMethodType, CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any, cast

import numpy as np
from torch import Tensor

from .slots import ContainerSlot, GetterSlot, NamespaceSlot, Slot, is_plain, same, same_content
from .trusted_libraries import is_trusted, is_trusted_file

_MEMBERS: dict[type, tuple[str, ...]] = {
    MethodType: ("__func__", "__self__"),
    BuiltinMethodType: ("__name__", "__self__"),
    partial: ("func", "args", "keywords", "__dict__"),
}
"""Callables that are compared by what they hold."""
_BASES = (object, dict, list, set, deque, OrderedDict)
"""Built-in classes all of whose state the places tell."""
_POINTER = object.__basicsize__ // 2


def are_twins(theirs: Sequence[Slot], mine: Sequence[Slot], tensors: Mapping[int, Tensor]) -> bool:
    """True if the places are alike in pairs. `tensors` maps the id of each of their parameters and buffers to mine."""
    if len(theirs) != len(mine):
        return False
    pairs = _Pairs(tensors)
    return all(map(pairs.alike_places, theirs, mine)) and pairs.told.keys() >= pairs.met.keys()


class _Pairs:
    """The pairs of objects that the places hold, and those that the places describe completely.

    `met` and `told` map the id of an object to its counterpart, `back` the id of a counterpart to the object.
    """

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        self.met: dict[int, object] = {}
        self.back: dict[int, int] = {}
        self.told: dict[int, object] = dict(tensors)

    def alike(self, a: object, b: object) -> bool:
        """True if two values are alike, provided that the places of each pair of objects that was met are."""
        kind = type(a)
        if kind is frozenset and a is not b:
            return _same_set(a, b)
        if same(a, b):
            return True
        if isinstance(a, Tensor):
            return self.told.get(id(a)) is b
        if kind is not type(b) or is_plain(a):
            return False
        if kind in _MEMBERS:
            return all(self.alike(getattr(a, name), getattr(b, name)) for name in _MEMBERS[kind])
        if isinstance(a, tuple) and isinstance(b, tuple):
            return self._all_alike(cast("tuple[object, ...]", a), cast("tuple[object, ...]", b))
        if kind is dict and not a and not b:
            return True
        return self._pair_up(a, b)

    def _all_alike(self, a: Sequence[object], b: Sequence[object]) -> bool:
        return len(a) == len(b) and all(map(self.alike, a, b))

    def _pair_up(self, a: object, b: object) -> bool:
        return self.met.setdefault(id(a), b) is b and self.back.setdefault(id(b), id(a)) == id(a)

    def _note_described(self, a: object, b: object) -> bool:
        """Note that the places of two objects are compared; False if these do not tell all of an object."""
        if a is b or isinstance(a, Tensor):
            return a is b or self.told.get(id(a)) is b
        if type(a) is not type(b) or not self._pair_up(a, b) or not _is_described(a, b):
            return False
        self.told[id(a)] = b
        return True

    def alike_places(self, a: Slot, b: Slot) -> bool:
        """True if the places belong to one object, or to a pair, and hold values that are alike."""
        if isinstance(a, NamespaceSlot) and isinstance(b, NamespaceSlot):
            return self._alike_names(a, b)
        if isinstance(a, GetterSlot) and isinstance(b, GetterSlot):
            return a.label == b.label and self._note_described(a.owner, b.owner) and self.alike(a.known, b.known)
        if isinstance(a, ContainerSlot) and isinstance(b, ContainerSlot):
            return self._note_described(a.value, b.value) and self._alike_content(_content(a), _content(b))
        return False

    def _alike_names(self, a: NamespaceSlot, b: NamespaceSlot) -> bool:
        if a.owner is None and a.held is not b.held:
            return False
        return a.keys == b.keys and self._note_described(a.owner, b.owner) and self._all_alike(a.known, b.known)

    def _alike_content(self, a: object, b: object) -> bool:
        if isinstance(a, tuple) and isinstance(b, tuple):
            return self._all_alike(cast("tuple[object, ...]", a), cast("tuple[object, ...]", b))
        return _same_set(a, b) if isinstance(a, frozenset) else same_content(a, b)


def _content(slot: ContainerSlot) -> Any:
    """Return what a container held; of hooks without their numbers, since two modules have other ones."""
    return slot.known[len(slot.known) // 2 :] if slot.numbered else slot.known


def _same_set(a: Any, b: Any) -> bool:
    """True if two sets hold the same objects, or equal plain values: other objects may be equal, and not alike."""
    return a == b and (all(map(is_plain, a)) or set(map(id, a)) == set(map(id, b)))


def _is_described(a: object, b: object) -> bool:
    """True if places tell all that code can read of two objects of one class."""
    if isinstance(a, CellType):
        return True
    if isinstance(a, FunctionType):
        return (
            isinstance(b, FunctionType)
            and a.__code__ is b.__code__
            and not (is_trusted_file(a.__code__.co_filename) and a.__closure__)
        )
    if type(a) is np.ndarray:
        return True
    return not isinstance(a, type) and _is_of_python(type(a))


@lru_cache(maxsize=4096)
def _is_of_python(kind: type) -> bool:
    """True if instances have no state but attributes, `__slots__`, and the elements of a container.

    State in C needs memory: the size of an instance is compared with that of these parts. The walk reads no slots of a
    trusted library's class.
    """
    base = next(c for c in kind.__mro__ if c in _BASES)
    read = [c for c in kind.__mro__ if "__slots__" in vars(c) and not is_trusted(c)]
    slots = sum(isinstance(x, MemberDescriptorType) for c in read for x in vars(c).values())
    offsets = (kind.__dictoffset__ > base.__dictoffset__) + (kind.__weakrefoffset__ > base.__weakrefoffset__)
    return kind.__itemsize__ == 0 and kind.__basicsize__ == base.__basicsize__ + _POINTER * (slots + offsets)
