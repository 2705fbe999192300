"""What functions read from around them: cells of closures, globals, and the objects that they are methods of.

Only functions outside of installed packages are looked into, and the functions that those name: what a package keeps
is no state of a training step.
"""

from __future__ import annotations

import dis
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from sysconfig import get_paths
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, cast

from torch import Tensor, nn

INSTALLED = tuple({get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
OWN = str(Path(__file__).parents[1])
MOST_FUNCTIONS = 1_000
MOST_ELEMENTS = 1_000
"""Larger containers count by identity: they are data, not settings."""
MISSING = object()


@dataclass(frozen=True, slots=True)
class Place:
    """What a function reads, by its name: a cell, a global of the module it is in, or what its object holds."""

    owner: Any
    name: str

    def now(self) -> Any:
        if isinstance(self.owner, CellType):
            return _filled(self.owner)
        if isinstance(self.owner, dict):
            return cast(dict[str, Any], self.owner).get(self.name, MISSING)
        return vars(self.owner)

    def put(self, value: Any) -> None:
        if isinstance(self.owner, CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, dict):
            self.owner[self.name] = value


def places(callables: Iterable[Any]) -> Iterator[Place]:
    """Where these, and the functions that they name, read what is a setting: neither a function nor a module."""
    waiting, seen = list(callables), set[int]()
    while waiting and len(seen) < MOST_FUNCTIONS:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, FunctionType):
            for place in reads(found):
                value = place.now()
                if isinstance(value, (FunctionType, MethodType, partial)):
                    waiting.append(value)
                elif _is_setting(value):
                    yield place
        else:
            waiting += _functions_of(found)
            yield from (Place(held, type(held).__name__) for held in _held_by(found))


def reads(function: FunctionType) -> Iterator[Place]:
    """The cells and globals that the function reads; none of a function in an installed package."""
    code = function.__code__
    if code.co_filename.startswith((*INSTALLED, OWN)):
        return
    yield from (Place(c, n) for n, c in zip(code.co_freevars, function.__closure__ or (), strict=True))
    yield from (Place(function.__globals__, name) for name in _globals(code) if name in function.__globals__)


@lru_cache(maxsize=4096)
def _globals(code: CodeType) -> tuple[str, ...]:
    """The names that the code, and what is defined in it, takes from its module."""
    inner = [name for c in code.co_consts if isinstance(c, CodeType) for name in _globals(c)]
    own = [str(i.argval) for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    return tuple(dict.fromkeys([*own, *inner]))


def _functions_of(found: Any) -> list[Any]:
    """What is called where an object is: its class's functions, those of a method, of a partial call."""
    if isinstance(found, MethodType):
        return [found.__func__]
    if isinstance(found, partial):
        return [found.func, *found.args, *found.keywords.values()]
    name = "forward" if isinstance(found, nn.Module) else "__call__"
    function = getattr(type(found), name, None)
    return [function] if isinstance(function, FunctionType) else []


def _held_by(found: Any) -> list[Any]:
    """The attributes of an object of the user's that is called, or whose method is."""
    owner = found.__self__ if isinstance(found, MethodType) else found
    plain = isinstance(owner, (nn.Module, partial, type)) or type(owner).__module__ == "builtins"
    return [] if plain or not hasattr(owner, "__dict__") else [owner]


def _is_setting(value: Any) -> bool:
    if isinstance(value, Tensor) or value is None:
        return True
    if isinstance(value, (nn.Module, type, ModuleType)) or callable(value) or value is MISSING:
        return False
    if isinstance(value, Sized):
        return not _is_data(value)
    return not hasattr(value, "__dict__") or type(value) in (SimpleNamespace, Namespace) or not _is_installed(value)


def _is_data(value: Sized) -> bool:
    try:
        return len(value) > MOST_ELEMENTS
    except TypeError:
        return True


def _is_installed(value: Any) -> bool:
    """True for objects of packages: loggers, clients, files."""
    module = sys.modules.get(type(value).__module__)
    return str(getattr(module, "__file__", None) or INSTALLED[0]).startswith((*INSTALLED, OWN)) and module is not _MAIN


_MAIN = sys.modules.get("__main__")


def _filled(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING
