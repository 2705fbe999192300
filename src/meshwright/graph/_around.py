"""What functions read from around them: cells of closures, globals, and attributes of the objects that they name.

Code says what counts (`chains`): of a trainer whose method is the loss, the attributes that the method reads, and those
that the methods read which it calls. An object that is handed on whole counts whole. Only what a user wrote is looked
into: what an installed package keeps is no state of a training step.
"""

from __future__ import annotations

import inspect
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from sysconfig import get_paths
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ._names import Chain, chains

INSTALLED = tuple({get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
OWN = str(Path(__file__).parents[1])
MOST_FUNCTIONS = 1_000
MOST_ELEMENTS = 1_000
"""Larger containers count by identity: they are data, not settings."""
PASSES = ("forward", "backward", "setup_context")
"""What a function with a gradient of its own consists of."""
MISSING = object()
Bound = dict[str, Any]
"""Values by the names of parameters."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a function reads, by its name: a cell, a key of a table of globals, an attribute of an object.

    `only_which`: it counts which object is there, not what that holds: attributes are places of their own.
    """

    owner: Any
    name: str
    only_which: bool = False

    @property
    def label(self) -> str:
        """Its name, with what it is an attribute of."""
        of = self.owner if isinstance(self.owner, type) else type(self.owner)
        return self.name if isinstance(self.owner, (CellType, dict)) else f"{of.__name__}.{self.name}"

    def now(self) -> Any:
        """What is there, without running any code."""
        if isinstance(self.owner, CellType):
            return _filled(self.owner)
        if isinstance(self.owner, dict):
            return cast(dict[str, Any], self.owner).get(self.name, MISSING)
        return attribute(self.owner, self.name)

    def put(self, value: Any) -> None:
        if isinstance(self.owner, CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            self._put_attribute(value)

    def _put_attribute(self, value: Any) -> None:
        if value is self.now():
            return
        if isinstance(self.owner, type):
            delattr(self.owner, self.name) if value is MISSING else setattr(self.owner, self.name, value)
        elif value is MISSING or any(value is member for member in _members(self.owner, self.name)):
            vars(self.owner).pop(self.name, None)
        else:
            object.__setattr__(self.owner, self.name, value)


def attribute(owner: Any, name: str) -> Any:
    """An attribute where it is kept: with the object, else with its class; a property counts as missing."""
    held: dict[str, Any] = getattr(owner, "__dict__", {})
    if name in held:
        return held[name]
    for member in _members(owner, name):
        if inspect.ismemberdescriptor(member) or inspect.isgetsetdescriptor(member):
            return _slot(member, owner)
        return MISSING if isinstance(member, (property, cached_property)) else member
    return MISSING


def places(callables: Iterable[Any]) -> Iterator[Place]:
    """Where these, and the functions that they name, read what is a setting: neither a function nor a module."""
    reading = _Reading()
    for found in callables:
        reading.call(found)
    reading.follow()
    return iter(reading.found.values())


@dataclass(slots=True)
class _Reading:
    """The functions that are still to be read, each with what its parameters are known to be."""

    waiting: deque[tuple[FunctionType, Bound]] = field(default_factory=deque[tuple[FunctionType, "Bound"]])
    seen: dict[tuple[int, ...], Any] = field(default_factory=dict[tuple[int, ...], Any])
    found: dict[tuple[int, str], Place] = field(default_factory=dict[tuple[int, str], Place])

    def follow(self) -> None:
        while self.waiting:
            function, bound = self.waiting.popleft()
            for chain in chains(function.__code__):
                self._name(function, bound, chain)

    def call(self, value: Any) -> None:
        """What is called there: a function, a method, a partial call, an object."""
        if isinstance(value, FunctionType):
            self._read(value)
        elif isinstance(value, (MethodType, partial)):
            function, args, keywords = _given(value)
            self._read(function, *args, **keywords)
        elif isinstance(value, type):
            if issubclass(value, torch.autograd.Function):
                self._members(value, PASSES)
        else:
            self._members(value, ("forward",) if isinstance(value, nn.Module) else ("__call__",))

    def _members(self, owner: Any, names: Iterable[str]) -> None:
        for name in names:
            for member in _members(owner, name):
                self._member(member, owner)

    def _member(self, member: Any, owner: Any) -> None:
        """What a class has by a name: all that could be called or run for it."""
        if isinstance(member, staticmethod):
            self._read(member.__func__)
            return
        if isinstance(member, classmethod):
            member, owner = member.__func__, owner if isinstance(owner, type) else type(owner)
        elif isinstance(member, (property, cached_property)):
            member = member.fget if isinstance(member, property) else member.func
        if isinstance(member, FunctionType):
            self._read(member, owner)

    def _read(self, function: Any, *args: Any, **keywords: Any) -> None:
        key = id(function), *map(id, args), *map(id, keywords.values())
        if not isinstance(function, FunctionType):
            self._value(None, function, ())
            for given in (*args, *keywords.values()):
                self._value(None, given, ())
        elif key not in self.seen and len(self.seen) < MOST_FUNCTIONS:
            self.seen[key] = function, args, keywords
            if not function.__code__.co_filename.startswith((*INSTALLED, OWN)):
                self.waiting.append((function, _bound(function, args, keywords)))

    def _name(self, function: FunctionType, bound: Bound, chain: Chain) -> None:
        """Follows a name to what it stands for, where that is not made in the function itself."""
        code = function.__code__
        if chain.kind == "global":
            place = Place(function.__globals__, chain.name)
        elif chain.name in code.co_freevars:
            place = Place((function.__closure__ or ())[code.co_freevars.index(chain.name)], chain.name)
        else:
            place = Place(bound, chain.name)
        value = place.now()
        if chain.stored and not callable(value):
            self._found(place)
        self._value(place, value, chain.path)

    def _value(self, place: Place | None, value: Any, path: tuple[str, ...]) -> None:
        """Something that code names, and the attributes of it that the code reads."""
        if isinstance(value, (FunctionType, MethodType, partial)):
            self.call(value)
        elif isinstance(value, (type, ModuleType, nn.Module)) or _is_users(value):
            self._object(place, value, path)
        elif place is not None and (_is_setting(value) or (value is MISSING and not isinstance(place.owner, dict))):
            self._found(place)

    def _object(self, place: Place | None, value: Any, path: tuple[str, ...]) -> None:
        """An object of the user's: which it is, and what is read of it; all of it where it is handed on whole."""
        self.call(value)
        if isinstance(value, (type, ModuleType, nn.Module)):
            if path and not _is_installed(value):
                self._attribute(value, path)
            return
        if place is not None:
            self._found(Place(place.owner, place.name, only_which=True))
        if path:
            self._attribute(value, path)
        elif not callable(value):
            self._found(Place(value, "__dict__"))

    def _attribute(self, owner: Any, path: tuple[str, ...]) -> None:
        self._members(owner, path[:1])
        place = Place(vars(owner) if isinstance(owner, ModuleType) else owner, path[0])
        self._value(place, place.now(), path[1:])

    def _found(self, place: Place) -> None:
        known = self.found.get(key := (id(place.owner), place.name))
        if known is None or known.only_which:
            self.found[key] = place


def _given(call: Any) -> tuple[Any, tuple[Any, ...], Bound]:
    """What is called at last by a method or a partial call, and what is given to it already."""
    args: tuple[Any, ...] = ()
    keywords: Bound = {}
    while isinstance(call, (MethodType, partial)):
        if isinstance(call, MethodType):
            args, call = (call.__self__, *args), call.__func__
        else:
            args, keywords, call = (*call.args, *args), {**call.keywords, **keywords}, call.func
    return call, args, keywords


def _bound(function: FunctionType, args: Sequence[Any], keywords: Bound) -> Bound:
    """What the parameters of a function are known to be: those that are given, and defaults."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    usual = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    return {**usual, **(function.__kwdefaults__ or {}), **dict(zip(names, args, strict=False)), **keywords}


def _members(owner: Any, name: str) -> Iterator[Any]:
    """What classes have by a name: those of an object, or a class and those that it comes from."""
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    return (vars(kind)[name] for kind in kinds if name in vars(kind))


def _slot(member: Any, owner: Any) -> Any:
    try:
        return member.__get__(owner)
    except AttributeError:
        return MISSING


def _is_users(value: Any) -> bool:
    """Whether it is an object of a class that a user wrote, or a namespace, with attributes."""
    if isinstance(value, (SimpleNamespace, Namespace)):
        return True
    kind = type(value)
    has = hasattr(value, "__dict__") or any("__slots__" in vars(k) for k in kind.__mro__)
    return has and not isinstance(value, (Tensor, Sized)) and kind.__module__ != "builtins" and not _is_installed(value)


def _is_setting(value: Any) -> bool:
    if isinstance(value, Tensor) or value is None:
        return True
    if callable(value) or value is MISSING:
        return False
    if isinstance(value, Sized):
        return not _is_data(value)
    return not hasattr(value, "__dict__") or not _is_installed(value)


def _is_data(value: Sized) -> bool:
    try:
        return len(value) > MOST_ELEMENTS
    except TypeError:
        return True


def _is_installed(value: Any) -> bool:
    """True for objects, classes and modules of packages: loggers, clients, files."""
    kind = value if isinstance(value, type) else type(value)
    module = value if isinstance(value, ModuleType) else sys.modules.get(kind.__module__)
    return str(getattr(module, "__file__", None) or INSTALLED[0]).startswith((*INSTALLED, OWN)) and module is not _MAIN


_MAIN = sys.modules.get("__main__")


def _filled(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING
