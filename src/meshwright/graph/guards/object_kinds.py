"""Kinds of objects: the references that `Reach` follows, the values that it reads, and the objects that it skips."""

from __future__ import annotations

import decimal
import gc
import logging
import os
import random
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property, lru_cache, partial, partialmethod
from itertools import chain
from operator import attrgetter, methodcaller
from threading import Thread
from types import (
    BuiltinMethodType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as of_modules
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .executed import named_by
from .slots import MISSING
from .trusted_libraries import is_installed_file, is_trusted, is_trusted_file

_STATELESS = ("logging", "threading", "warnings", "typing", "abc", "re", "concurrent", "asyncio", "io", "_io", "types")
"""Modules of the standard library whose objects hold no state that numbers depend on."""
MEMBERS: dict[type, tuple[str, ...]] = {
    MethodType: ("__func__", "__self__"),
    BuiltinMethodType: ("__self__",),
    partial: ("func", "args", "keywords"),
    property: ("fget",),
    classmethod: ("__func__",),
    staticmethod: ("__func__",),
    cached_property: ("func",),
    partialmethod: ("func", "args", "keywords"),
}
"""Types of callables, and the attributes that are followed."""
NAMING = (attrgetter, methodcaller)
"""Types of callables that read attributes by stored names."""
_TORCH = re.compile(r"torch\.(amp|distributions|optim|utils\.data)\b(?!.*\._).*")
"""Modules of torch whose objects users change: schedules, distributions, samplers."""
SPECIAL = frozenset({"__dict__", "__weakref__"})


def is_followed(value: object) -> bool:
    """True for objects that are followed from a trusted module or class: modules, and functions from untrusted code."""
    own = type(value) is FunctionType and not is_trusted_file(value.__code__.co_filename)
    return own or issubclass(type(value), ModuleType)


def held_variables() -> dict[Any, Any]:
    """Return the dict behind `os.environ`, since a dict can be compared fast."""
    return os.environ._data  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


def variables_named(names: Sequence[str]) -> tuple[Any, ...]:
    """Return the values of the environment variables `names`."""
    held = held_variables()
    return tuple(held.get(os.environ.encodekey(name)) for name in names)


def _context_value(value: ContextVar[Any]) -> object:
    return value.get(MISSING)


MRO = attrgetter("__mro__")
_CACHE = type(lru_cache(len))


def getter_of(value: object) -> Callable[[Any], Any] | None:
    """Return a function that reads the state of a context variable, reference, random generator, cache or iterator.

    Returns None for other objects.
    """
    if isinstance(value, ContextVar):
        return _context_value
    if isinstance(value, weakref.ref):
        return _referent_id
    if isinstance(value, (np.random.Generator, np.random.RandomState, random.Random)):
        return _generator_state
    if isinstance(value, torch.Generator):
        return _torch_generator_state
    if isinstance(value, _CACHE):
        return cached_results
    return _iterator_position if is_iterator(value) else None


def _referent_id(value: weakref.ref[object]) -> int | None:
    """Return the id of the object of a weak reference, or None, without keeping the object alive."""
    return id(value()) if value() is not None else None


def _generator_state(value: random.Random | np.random.Generator | np.random.RandomState) -> str:
    """Return the state of a random generator as text."""
    if isinstance(value, random.Random):
        return repr(value.getstate())
    state = value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state(legacy=False)
    return repr(state)


def _torch_generator_state(value: torch.Generator) -> bytes:
    return bytes(value.get_state().numpy())


def cached_results(value: object) -> tuple[Any, ...]:
    """Return the keys and values of an `lru_cache`."""
    tables = [cast("dict[Any, Any]", x).items() for x in gc.get_referents(value) if isinstance(x, dict)]
    return tuple(chain.from_iterable(chain.from_iterable(tables)))


def decimal_context(_: object) -> str:
    return repr(decimal.getcontext())


def global_hooks() -> list[dict[Any, Any]]:
    """Return torch's global hook tables, whose hooks every layer or every optimizer calls."""
    owners = (vars(of_modules), register_optimizer_step_pre_hook.__globals__)
    return [owner[name] for owner in owners for name in owner if _GLOBAL.fullmatch(name)]


_GLOBAL = re.compile(r"_global_\w*hooks")


def slot_of(member: MemberDescriptorType | GetSetDescriptorType, value: object) -> object:
    try:
        return member.__get__(value)
    except AttributeError:
        return MISSING


def built_in_names(namespace: dict[str, Any]) -> Mapping[str, Any]:
    held = namespace.get("__builtins__", {})
    return vars(held) if isinstance(held, ModuleType) else held


def is_namespace(value: object) -> bool:
    """True for namespace objects, whose attributes are settings that other code reads by name."""
    return type(value).__name__ in ("SimpleNamespace", "Namespace", "_local", "local")


def is_stateless(kind: type) -> bool:
    """True for classes of trusted libraries whose objects hold no settings; they are compared by identity."""
    if not is_trusted(kind) or issubclass(kind, logging.Logger):
        return False
    top = kind.__module__.partition(".")[0]
    if top == "torch":
        return not _TORCH.fullmatch(kind.__module__)
    return top in _STATELESS or top not in sys.stdlib_module_names or kind.__module__ == "builtins"


def is_background_type(kind: type) -> bool:
    """True for log handlers and for threads of installed packages; state that they change is no setting of a step."""
    if not issubclass(kind, Thread):
        return issubclass(kind, logging.Handler)
    return is_installed_file(str(getattr(sys.modules.get(kind.__module__), "__file__", "")))


def is_iterator(value: object) -> bool:
    kind = type(value)
    return hasattr(kind, "__next__") and is_trusted(kind)


def _iterator_position(value: object) -> object:
    """Return the position of a built-in iterator or generator without advancing it."""
    frame = getattr(value, "gi_frame", MISSING)
    if frame is not MISSING:
        return None if frame is None else (frame.f_lasti, repr(frame.f_locals))
    try:
        return (repr(value), repr(value.__reduce__()))
    except (TypeError, AttributeError):
        return repr(value)


@lru_cache(maxsize=4096)
def names_of_torch(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names that appear in the functions of torch's layer classes, bases of `kind` below `nn.Module`."""
    names = {"training"}
    for base in kind.__mro__:
        if is_trusted(base) and base not in (nn.Module, object):
            functions = (getattr(f, "__func__", f) for f in vars(base).values())
            for function in functions:
                if isinstance(function, FunctionType):
                    names |= named_by(function.__code__).names
    return frozenset(names)
