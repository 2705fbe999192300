"""What a forward pass changes beside tensors: Python state that a program would freeze, found by looking twice."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ._errors import SideEffectError

_TABLES = ("_parameters", "_buffers", "_modules")
_PASSED_OVER = {*_TABLES, "_non_persistent_buffers_set"}
_DEPTH = 4
_OBJECTS = 2
"""How deep containers are looked into, and how deep objects of the user's classes are."""

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_LIBRARIES = ("torch", "numpy", __name__.partition(".")[0])


@dataclass(frozen=True, slots=True)
class _Attribute:
    """A value, what it looked like, whether that can change while it stays the same object, and what it held."""

    value: Any
    look: Any
    changes: bool
    held: Any

    @classmethod
    def of(cls, value: Any) -> _Attribute:
        return cls(value, _look(value), _changes(value), _held(value))

    def is_now(self, value: Any) -> bool:
        return (value is self.value and not self.changes) or _look(value) == self.look


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A module's parts: where each keeps its attributes, what they were, and what its tables held."""

    parts: tuple[tuple[str, nn.Module, Mapping[str, _Attribute], tuple[Mapping[str, Any], ...]], ...]

    @classmethod
    def of(cls, module: nn.Module) -> Snapshot:
        return cls(
            tuple(
                (
                    path,
                    part,
                    {key: _Attribute.of(value) for key, value in _own(part)},
                    tuple(dict(getattr(part, table)) for table in _TABLES),
                )
                for path, part in module.named_modules()
            )
        )

    def holds(self) -> bool:
        """True when nothing but tensors has changed."""
        return next(self._found(), None) is None

    def check(self, asked: str) -> None:
        """Raises SideEffectError for the first thing that changed, after putting everything back."""
        found = next(self._found(), None)
        self.restore()
        if found is not None:
            raise side_effect(asked, *found)

    def restore(self) -> None:
        """Puts everything back, but for the tensors that tables of parameters and buffers hold by known names."""
        for _, part, attributes, tables in self.parts:
            for key in [key for key, _ in _own(part) if key not in attributes]:
                del part.__dict__[key]
            for key, attribute in attributes.items():
                _put_back(attribute.value, attribute.held)
                part.__dict__[key] = attribute.value
            for name, before in zip(_TABLES, tables, strict=True):
                table: dict[str, Any] = getattr(part, name)
                now = {key: before[key] if name == "_modules" else table.get(key, before[key]) for key in before}
                table.clear()
                table.update(now)

    def _found(self) -> Iterator[tuple[str, str, str]]:
        """What changed: its name, what it was, what it is."""
        for path, part, attributes, tables in self.parts:
            for name, before in zip(_TABLES, tables, strict=True):
                table = getattr(part, name)
                if list(table) != list(before) or (name == "_modules" and list(table.values()) != list(before.values())):
                    yield f"{path}.{name}".lstrip("."), _short(list(before)), _short(list(table))
            now = dict(_own(part))
            for key in attributes.keys() | now.keys():
                if key not in attributes or key not in now or not attributes[key].is_now(now[key]):
                    was = _short(attributes[key].value) if key in attributes else "not there"
                    yield f"{path}.{key}".lstrip("."), was, _short(now.get(key))


def side_effect(asked: str, what: str, before: str, after: str) -> SideEffectError:
    return SideEffectError(
        asked, f"{what} was {before}, and is {after} after it" if before != after else f"{what}, {after}, was changed",
        "a program is recorded once: what Python changes in each pass would stay as it was then",
        "a buffer (register_buffer) that is changed by tensor operations",
    )  # fmt: skip


@contextmanager
def unchanged(module: nn.Module) -> Generator[None]:
    """What happens inside leaves the module's Python state, and Python's, NumPy's and torch's generators alone.

    If it does not, everything is put back and SideEffectError is raised; it is put back too where an error is raised.
    """
    before, drawn = Snapshot.of(module), _generators()
    asked = f"to capture the forward pass of {type(module).__name__}"
    try:
        yield
    except BaseException:
        before.restore()
        _set_generators(drawn)
        raise
    moved = [name for name, a, b in zip(_GENERATORS, drawn, _generators(), strict=True) if a != b]
    _set_generators(drawn)
    before.check(asked)
    if moved:
        raise side_effect(asked, f"the state of {moved[0]}'s random generator", "another", "advanced")


def _own(part: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in part.__dict__.items():
        if key not in _PASSED_OVER and not key.endswith("_hooks"):
            yield key, value


def _look(value: Any, depth: int = _DEPTH, objects: int = _OBJECTS) -> Any:
    """What can be compared later: numbers and texts by value, containers by what they hold, the rest by identity."""
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, Tensor):
        return (id(value), value._version)
    if depth and isinstance(value, Mapping):
        return tuple((_look(k, depth - 1, 0), _look(v, depth - 1, objects)) for k, v in value.items())
    if depth and isinstance(value, (Sequence, set, frozenset)):
        return (type(value), *[_look(v, depth - 1, objects) for v in value])
    if objects and _is_users(value):
        return (id(value), _look(vars(value), depth, objects - 1))
    return id(value)


def _is_users(value: Any) -> bool:
    """True for objects of classes that the user wrote, which hold attributes."""
    kind = type(value)
    written = not kind.__module__.startswith(_LIBRARIES) and kind.__module__ != "builtins"
    return written and not isinstance(value, (nn.Module, type)) and not callable(value) and hasattr(value, "__dict__")


def _changes(value: Any) -> bool:
    """True for what can look different and be the same object."""
    if isinstance(value, tuple):
        return any(_changes(v) for v in value)
    return isinstance(value, (Tensor, Mapping, Sequence, set)) and not isinstance(value, _PLAIN) or _is_users(value)


def _held(value: Any, depth: int = _DEPTH) -> Any:
    """What containers hold, to be put back."""
    if not depth or isinstance(value, (*_PLAIN, Tensor, nn.Module)):
        return None
    if isinstance(value, Mapping):
        return [(k, v, _held(v, depth - 1)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [(v, _held(v, depth - 1)) for v in value]
    if isinstance(value, set):
        return set(value)
    return _held(vars(value), depth - 1) if _is_users(value) else None


def _put_back(value: Any, held: Any) -> None:
    if held is None:
        return
    if _is_users(value):
        value = vars(value)
    if isinstance(value, MutableMapping):
        value.clear()
        value.update({k: v for k, v, _ in held})
    elif isinstance(value, list):
        value[:] = [v for v, _ in held]
    elif isinstance(value, set):
        value.clear()
        value.update(held)
    for *_, v, inner in held if not isinstance(held, set) else ():
        _put_back(v, inner)


def _short(value: Any) -> str:
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) < 80 else text[:77] + "..."


_GENERATORS = ("Python", "NumPy", "torch")


def _generators() -> tuple[Any, Any, bytes]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (kind, bytes(np.asarray(keys)), *rest), bytes(torch.get_rng_state().numpy())


def _set_generators(states: tuple[Any, Any, bytes]) -> None:
    python, (kind, keys, *rest), ours = states
    random.setstate(python)
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))  # pyright: ignore[reportArgumentType]
    torch.set_rng_state(torch.frombuffer(bytearray(ours), dtype=torch.uint8))
