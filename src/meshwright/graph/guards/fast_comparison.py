"""Fast comparison of all slots of a guard: flat lists that C code iterates, about 30 ns per entry."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import chain
from operator import call, contains, eq, is_, itemgetter
from typing import Any

from .slots import ContainerSlot, GetterSlot, NamespaceSlot, Slot, content, same_content

_CALL: Any = call  # its stub has no form that `map` can take


class FastComparison:
    """Comparison by identity with the values that slots and containers hold at construction, in the same order."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._entries: tuple[list[Callable[[Any], tuple[Any, ...]]], list[Any], list[Any]] = ([], [], [])
        self._absent: tuple[list[Any], list[Any]] = ([], [])
        self._spaces: tuple[list[Any], list[Any]] = ([], [])
        self._items: tuple[list[Any], list[int], list[Any]] = ([], [], [])
        self._reads: dict[Callable[[Any], Any], tuple[list[Any], list[Any]]] = {}
        self._owners: list[Any] = []
        self._types: list[type] = []
        self._empty: list[Any] = []
        self._contents: list[tuple[Any, Any]] = []
        self._computed: list[GetterSlot] = []
        for slot in slots:
            self._add(slot)

    def _add(self, slot: Slot) -> None:
        if isinstance(slot, NamespaceSlot):
            self._add_names(slot)
        elif isinstance(slot, GetterSlot):
            self._add_getter(slot)
        elif isinstance(slot, ContainerSlot):
            self.add_container(slot.value)

    def _add_getter(self, slot: GetterSlot) -> None:
        value = slot.now()
        if value is not slot.now():  # a new object at each reading, as a member of Cython's functions gives
            self._computed.append(slot)
        else:
            self.add_read(slot.get, slot.owner, value)

    def add_read(self, get: Callable[[Any], Any], owner: object, value: object) -> None:
        """Compare what `get(owner)` returns with `value`."""
        owners, values = self._reads.setdefault(get, ([], []))
        owners.append(owner)
        values.append(value)

    def _add_names(self, slot: NamespaceSlot) -> None:
        self._add_entries(slot.held, slot.keys)
        if slot.counts is not None:
            self._spaces[0].append(slot.held)
            self._spaces[1].append(list(slot.held))
        if slot.owner is not None:
            self._owners.append(slot.owner)
            self._types.append(type(slot.owner))

    def _add_entries(self, held: Any, keys: Iterable[Any]) -> None:
        present = [key for key in keys if key in held]
        absent = [key for key in keys if key not in held]
        self._absent[0].extend([held] * len(absent))
        self._absent[1].extend(absent)
        if present:
            get = itemgetter(*present, present[0])  # of one key alone, it returns no tuple
            self._entries[0].append(get)
            self._entries[1].append(held)
            self._entries[2].extend(get(held))

    def add_container(self, value: Any) -> None:
        """Compare the content of a container."""
        if isinstance(value, (dict, list)) and not value:
            self._empty.append(value)
        elif type(value) in (dict, OrderedDict, list):  # a subclass may have its own iterator
            self._items[0].append(value)
            self._items[1].append(len(value))
            self._items[2].extend(value)
            if isinstance(value, dict):
                self._add_entries(value, value)
        else:
            self._contents.append((value, content(value)))

    def holds(self) -> bool:
        """True if every slot holds the same object as at construction; getters that make objects give equal ones."""
        try:
            return (
                self._same_entries()
                and self._same_items()
                and self._same_reads()
                and self._same_contents()
                and self._same_computed()
            )
        except (KeyError, ValueError):  # an entry is gone, or a cell is empty now
            return False

    def _same_entries(self) -> bool:
        getters, owners, values = self._entries
        if not all(map(is_, chain.from_iterable(map(_CALL, getters, owners)), values)) or any(
            map(contains, *self._absent)
        ):
            return False
        held, names = self._spaces
        return all(map(eq, map(list, held), names)) and all(map(is_, map(type, self._owners), self._types))

    def _same_items(self) -> bool:
        held, counts, items = self._items
        if any(self._empty) or not all(map(eq, map(len, held), counts)):
            return False
        return all(map(is_, chain.from_iterable(held), items))

    def _same_reads(self) -> bool:
        return all(all(map(is_, map(get, owners), values)) for get, (owners, values) in self._reads.items())

    def _same_contents(self) -> bool:
        return all(same_content(known, content(value)) for value, known in self._contents)

    def _same_computed(self) -> bool:
        return all(slot.holds() for slot in self._computed)
