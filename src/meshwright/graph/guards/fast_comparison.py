"""Fast comparison of all slots of a guard: flat lists that C code iterates, about 50 ns per entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import eq, is_
from types import MappingProxyType
from typing import Any, cast

from .slots import MISSING, ContainerSlot, GetterSlot, NamespaceSlot, Slot, content, same_content


class Fast:
    """Comparison by identity with the values that the slots hold at construction."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._entries: dict[Callable[..., Any], tuple[list[Any], list[Any], list[Any]]] = {}
        self._spaces: tuple[list[Any], list[Any]] = ([], [])
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
            if isinstance(slot.value, (dict, list)) and not slot.known:
                self._empty.append(slot.value)
            elif slot.unordered:
                self._add_table(cast(dict[Any, Any], slot.value))
            else:
                self._contents.append((slot.value, content(slot.value)))

    def _add_getter(self, slot: GetterSlot) -> None:
        value = slot.now()
        if value is not slot.now():  # a new object at each reading, as a member of Cython's functions gives
            self._computed.append(slot)
            return
        owners, values = self._reads.setdefault(slot.get, ([], []))
        owners.append(slot.owner)
        values.append(value)

    def _add_names(self, slot: NamespaceSlot) -> None:
        get: Any = MappingProxyType.get if isinstance(slot.held, MappingProxyType) else dict.get
        owners, keys, values = self._entries.setdefault(get, ([], [], []))
        owners += [slot.held] * len(slot.keys)
        keys += slot.keys
        values += map(get, repeat(slot.held), slot.keys, repeat(MISSING))
        if slot.counts is not None:
            self._spaces[0].append(slot.held.keys())
            self._spaces[1].append(set(slot.held))
        if slot.owner is not None:
            self._owners.append(slot.owner)
            self._types.append(type(slot.owner))

    def _add_table(self, table: dict[Any, Any]) -> None:
        owners, keys, values = self._entries.setdefault(dict.get, ([], [], []))
        owners += [table] * len(table)
        keys += table
        values += table.values()
        self._spaces[0].append(table.keys())
        self._spaces[1].append(set(table))

    def holds(self) -> bool:
        """True if every slot holds the same object as at construction; getters that make objects give equal ones."""
        try:
            return self._same_entries() and self._same_reads() and self._same_contents() and self._same_computed()
        except ValueError:  # a cell that is empty now
            return False

    def _same_entries(self) -> bool:
        for get, (owners, keys, values) in self._entries.items():
            if not all(map(is_, map(get, owners, keys, repeat(MISSING)), values)):
                return False
        return all(map(eq, *self._spaces)) and all(map(is_, map(type, self._owners), self._types))

    def _same_reads(self) -> bool:
        return all(all(map(is_, map(get, owners), values)) for get, (owners, values) in self._reads.items())

    def _same_contents(self) -> bool:
        return not any(self._empty) and all(same_content(known, content(value)) for value, known in self._contents)

    def _same_computed(self) -> bool:
        return all(slot.holds() for slot in self._computed)
