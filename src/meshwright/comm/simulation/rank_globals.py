"""Globals and class attributes of a program, separate for each simulated rank, as they are for each process.

Simulated ranks are threads of one process, so they share its modules. When the simulation switches from one rank to
another, it saves the values that the first rank assigned, and restores the values of the second. Four kinds of values
are swapped:

* globals that a function of the program's own modules assigns (`global step`),
* class attributes of the program's own modules that a function assigns (`Counter.total += 1`),
* globals in which `torch.export` keeps its state,
* dicts that a class of any library uses as the state of all its instances (`self.__dict__ = self._shared_state`).

Lists and dicts that the program only changes in place stay shared: programs collect the results of all ranks in them.
The distributed tensors in them are hidden from other ranks, see `shared_values`.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator
from dis import get_instructions
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ..torch_hooks import EXPORTER
from .shared_values import SharedValues, containers_below

_MISSING = object()
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OWN = str(Path(__file__).parents[2])
_STATELESS = ("torch", "numpy", "sympy", __name__.partition(".")[0])
"""Large packages without state of the program; they are not searched for slots."""


class RankGlobal:
    """A global or a class attribute that has one value for each rank. A second search finds equal slots."""

    def __init__(self, holder: ModuleType | type, name: str) -> None:
        self.holder, self.name = holder, name

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RankGlobal) or type(other) is not type(self):
            return False
        return other.holder is self.holder and other.name == self.name

    def __hash__(self) -> int:
        return hash((id(self.holder), self.name))

    def read(self) -> Any:
        return vars(self.holder).get(self.name, _MISSING)

    def write(self, value: Any) -> None:
        if value is not _MISSING:
            setattr(self.holder, self.name, value)
        elif self.name in vars(self.holder):
            delattr(self.holder, self.name)

    def fresh(self) -> Any:
        """Return the first value of every rank if the module of the slot was loaded while ranks ran."""
        return self.read()


class SharedDict(RankGlobal):
    """A dict that is the state of all instances of a class; the content of the dict is swapped."""

    def read(self) -> Any:
        return dict(getattr(self.holder, self.name))

    def write(self, value: Any) -> None:
        held = getattr(self.holder, self.name)
        if held != value:
            held.clear()
            held.update(value)

    def fresh(self) -> Any:
        return {}


_found: dict[str, tuple[object, list[RankGlobal]]] = {}
"""Name of a module → the fingerprint of the module when it was searched, and the slots found in it."""


class _LoadedModules:
    """The modules of the last search. While the same ones are loaded, only the program's own are looked at again."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._modules: list[ModuleType] = []
        self._own: list[tuple[str, ModuleType]] = []
        self._of_libraries: list[RankGlobal] = []

    def slots(self) -> list[RankGlobal]:
        """Return every slot of the modules that are loaded now."""
        names, modules = [*sys.modules], [*sys.modules.values()]
        if names != self._names or modules != self._modules:  # thousands: Python compares identical ones fast
            own, libraries = list[tuple[str, ModuleType]](), list[tuple[str, ModuleType]]()
            for each in zip(names, modules, strict=True):
                (libraries if _is_constant(*each) else own).append(each)
            self._own = own
            self._of_libraries = [slot for name, lib in libraries for slot in _slots_now(name, lib, id(lib))]
            self._names, self._modules = names, modules  # last, since another simulation may search at the same time
        of_program = [slot for name, module in self._own for slot in _slots_now(name, module, _members_of(module))]
        return self._of_libraries + of_program


_loaded = _LoadedModules()


def _slots_now(name: str, module: ModuleType, looks: object) -> list[RankGlobal]:
    """Return the slots of a module, which is searched again if its fingerprint `looks` changed."""
    if _found.get(name, (None,))[0] != looks:
        _found[name] = (looks, list(_slots_of(name, module)))
    return _found[name][1]


def is_of_program(name: str) -> bool:
    """True for the name of a module that belongs to the program rather than to a library."""
    module = sys.modules.get(name)
    return module is not None and _may_have_state(name) and (name == "__main__" or not _is_of_library(name, module))


def _members_of(module: ModuleType) -> object:
    """Return a fingerprint of the members of a module.

    Of an imported module it is the number of names, since a later definition adds one, and the spec, which a reload
    replaces. A script, or a module made without an import, may give a name to another function at any time.
    """
    spec = getattr(module, "__spec__", None)
    if spec is None or module.__name__ == "__main__":
        return tuple(map(id, vars(module).values()))
    return id(spec), spec, len(vars(module))  # the spec too, so that no other object gets its id


def _is_constant(name: str, module: ModuleType) -> bool:
    """True for a library's module, whose members are searched once."""
    return name != "__main__" and _is_of_library(name, module)


def _is_of_library(name: str, module: ModuleType) -> bool:
    """True for modules of installed packages, of Python and of this package."""
    path = getattr(module, "__file__", None)
    return path is None or "site-packages" in path or path.startswith((*_LIBRARIES, _OWN))


def _slots_of(name: str, module: ModuleType) -> Iterator[RankGlobal]:
    """Yield the slots of a module and of its classes."""
    if not _may_have_state(name) or not hasattr(module, "__dict__"):
        return
    classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == name]
    for cls in classes:
        yield from (SharedDict(cls, attribute) for attribute in _shared_states(cls))
    if name in ("__main__", EXPORTER) or not _is_of_library(name, module):
        yield from _assigned_slots(module, classes)


def _assigned_slots(module: ModuleType, classes: list[type]) -> Iterator[RankGlobal]:
    """Yield the globals and class attributes that functions of the module assign."""
    codes = list(_codes(module, classes))
    yield from (RankGlobal(module, n) for n in sorted(_stored(codes, "STORE_GLOBAL")))
    assigned = _stored(codes, "STORE_ATTR")
    for cls in classes:
        yield from (RankGlobal(cls, n) for n, v in vars(cls).items() if n in assigned and _is_value(v))


def _may_have_state(name: str) -> bool:
    return name == EXPORTER or (name.partition(".")[0] not in _STATELESS and name not in sys.stdlib_module_names)


def _is_value(value: object) -> bool:
    """True for a value that may differ between ranks; functions and descriptors belong to the class."""
    return not callable(value) and not hasattr(value, "__get__")


def _shared_states(cls: type) -> Iterator[str]:
    """Yield the names of dicts of a class that its constructor makes the `__dict__` of every instance."""
    init = vars(cls).get("__init__")
    if not isinstance(init, FunctionType) or "__dict__" not in init.__code__.co_names:
        return
    if any(i.opname == "STORE_ATTR" and i.argval == "__dict__" for i in get_instructions(init)):
        names = set(init.__code__.co_names)
        yield from (n for n, v in vars(cls).items() if n in names and isinstance(v, dict))


def _codes(module: ModuleType, classes: list[type]) -> Iterator[CodeType]:
    """Yield the code of every function of a module, nested functions included."""
    members = [*vars(module).values(), *[m for cls in classes for m in vars(cls).values()]]
    found = [getattr(m, "__func__", getattr(m, "fget", m)) for m in members]
    todo = [f.__code__ for f in found if isinstance(f, FunctionType) and f.__module__ == module.__name__]
    while todo:
        code = todo.pop()
        yield code
        todo += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _stored(codes: list[CodeType], operation: str) -> set[str]:
    return {i.argval for code in codes for i in get_instructions(code) if i.opname == operation}


class RankGlobals:
    """The values of all slots for every rank of a simulation; the values of one rank at a time are in place."""

    def __init__(self, size: int, program: object) -> None:
        self._loaded = -1
        self._values: list[dict[RankGlobal, Any]] = [{} for _ in range(size)]
        self._slots: list[RankGlobal] = []
        self._shared = SharedValues(containers_below(program, is_of_program) if size else [])
        if size:
            self._look(lambda slot: slot.read())

    def leave(self, rank: int) -> None:
        """Save the values that the rank assigned."""
        if not self._values:
            return
        if len(sys.modules) != self._loaded:
            self._look(lambda slot: slot.fresh())
        self._values[rank] = {slot: slot.read() for slot in self._slots}
        self._shared.leave(rank)

    def enter(self, rank: int) -> None:
        """Restore the values that the rank assigned."""
        if not self._values:
            return
        values = self._values[rank]
        for slot in self._slots:
            slot.write(values[slot])
        self._shared.enter(rank)

    def end(self) -> None:
        """Show all values again, after the last rank has ended."""
        self._shared.enter(None)

    def _look(self, first: Callable[[RankGlobal], Any]) -> None:
        """Add the slots of modules loaded since the last search; every rank starts with the value of `first(slot)`."""
        self._loaded = len(sys.modules)
        known = set(self._slots)
        self._slots = _loaded.slots()
        for slot in self._slots:
            if slot not in known:
                value = first(slot)
                for values in self._values:
                    values[slot] = dict(value) if isinstance(slot, SharedDict) else value
