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

from meshwright.tensor import leaves_in

from ._around import Place, places
from ._errors import SideEffectError
from .torch_hooks import FakeTensor

_TABLES = ("_parameters", "_buffers", "_modules")
_PASSED_OVER = {*_TABLES, "_non_persistent_buffers_set"}
_FOLLOWING = {"_flat_weights", "_flat_weight_refs"}
"""What torch's recurrent layers renew by themselves when they are called with other parameters than before."""
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
class _Part:
    """A module: its attributes and what its tables held; those of its attributes that change only with their object."""

    path: str
    module: nn.Module
    attributes: Mapping[str, _Attribute]
    tables: tuple[Mapping[str, Any], ...]
    size: int
    steady: tuple[tuple[str, Any], ...]
    moving: tuple[str, ...]

    @classmethod
    def of(cls, path: str, module: nn.Module) -> _Part:
        attributes = {key: _Attribute.of(value) for key, value in _own(module)}
        return cls(
            path,
            module,
            attributes,
            tuple(dict(getattr(module, table)) for table in _TABLES),
            len(module.__dict__),
            tuple((key, a.value) for key, a in attributes.items() if not a.changes),
            tuple(key for key, a in attributes.items() if a.changes),
        )

    def holds(self) -> bool:
        """True when `changes` finds nothing: quicker."""
        now = self.module.__dict__
        if len(now) != self.size or any(now[t].keys() != b.keys() for t, b in zip(_TABLES, self.tables, strict=True)):
            return next(self.changes(), None) is None
        for key, value in self.steady:
            if now.get(key, self) is not value:
                return next(self.changes(), None) is None
        parts = now["_modules"]
        return all(parts[key] is part for key, part in self.tables[2].items()) and all(
            self.attributes[key].is_now(now.get(key)) for key in self.moving
        )

    def changes(self) -> Iterator[tuple[str, str, str]]:
        """What changed: its name, what it was, what it is."""
        for name, before in zip(_TABLES, self.tables, strict=True):
            table = getattr(self.module, name)
            if list(table) != list(before) or (name == "_modules" and list(table.values()) != list(before.values())):
                yield f"{self.path}.{name}".lstrip("."), _short(list(before)), _short(list(table))
        now, known = dict(_own(self.module)), self.attributes
        following = _FOLLOWING if isinstance(self.module, nn.RNNBase) else set[str]()
        for key in (known.keys() | now.keys()) - following:
            if key not in known or key not in now or not known[key].is_now(now[key]):
                was = _short(known[key].value) if key in known else "not there"
                yield f"{self.path}.{key}".lstrip("."), was, _short(now[key]) if key in now else "gone"

    def restore(self) -> None:
        """Puts everything back, but for the tensors that tables of parameters and buffers hold by known names."""
        for key in [key for key, _ in _own(self.module) if key not in self.attributes]:
            del self.module.__dict__[key]
        for key, attribute in self.attributes.items():
            _put_back(attribute.value, attribute.held)
            self.module.__dict__[key] = attribute.value
        for name, before in zip(_TABLES, self.tables, strict=True):
            table: dict[str, Any] = getattr(self.module, name)
            now = {key: before[key] if name == "_modules" else table.get(key, before[key]) for key in before}
            table.clear()
            table.update(now)


@dataclass(frozen=True, slots=True)
class _Setting:
    """What functions read at a place around them; a tensor there counts by identity."""

    place: Place
    attribute: _Attribute

    @classmethod
    def of(cls, place: Place) -> _Setting:
        value = place.now()
        if place.only_which or isinstance(value, Tensor):
            return cls(place, _Attribute(value, id(value), False, None))
        return cls(place, _Attribute.of(value))

    def holds(self) -> bool:
        value = self.place.now()
        if self.place.only_which or isinstance(value, Tensor):
            return value is self.attribute.value
        return self.attribute.is_now(value)

    def changes(self) -> Iterator[tuple[str, str, str]]:
        if not self.holds():
            yield self.place.label, _short(self.attribute.value), _short(self.place.now())

    def restore(self) -> None:
        _put_back(self.attribute.value, self.attribute.held)
        self.place.put(self.attribute.value)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The Python state of a module and of its parts, and of what its functions and others read from around them."""

    parts: tuple[_Part | _Setting, ...]

    @classmethod
    def of(cls, module: nn.Module, *others: Any) -> Snapshot:
        modules = [
            (f"{at}{path}", part) for at, m in (("", module), *_modules(others)) for path, part in m.named_modules()
        ]
        own = {id(part) for _, part in modules}
        read = [p for p in places([*others, *(part for _, part in modules)]) if id(p.owner) not in own]
        return cls((*[_Part.of(path, part) for path, part in modules], *map(_Setting.of, read)))

    def read(self) -> Iterator[tuple[str, Any]]:
        """What functions read from around them, by name."""
        return ((part.place.label, part.attribute.value) for part in self.parts if isinstance(part, _Setting))

    def holds(self) -> bool:
        """True when nothing but tensors has changed."""
        return all(part.holds() for part in self.parts)

    def check(self, asked: str) -> None:
        """Raises SideEffectError for the first thing that changed, after putting everything back."""
        found = next((change for part in self.parts for change in part.changes()), None)
        self.restore()
        if found is not None:
            raise side_effect(asked, *found)

    def restore(self) -> None:
        for part in self.parts:
            part.restore()


def side_effect(asked: str, what: str, before: str, after: str) -> SideEffectError:
    return SideEffectError(
        asked, f"{what} was {before}, and is {after} after it" if before != after else f"{what}, {after}, was changed",
        "a program is recorded once: what Python changes in each pass would stay as it was then",
        "a buffer (register_buffer) that is changed by tensor operations",
    )  # fmt: skip


def _modules(others: Sequence[Any]) -> Iterator[tuple[str, nn.Module]]:
    return (("loss.", other) for other in others if isinstance(other, nn.Module))


@contextmanager
def unchanged(module: nn.Module, *others: Any) -> Generator[None]:
    """What happens inside leaves Python's state alone, and Python's, NumPy's and torch's generators.

    That is what the module and its parts hold, and what they, and `others` that are called, read from around them.

    If it does not, everything is put back and SideEffectError is raised; it is put back too where an error is raised.
    """
    before, drawn = Snapshot.of(module, *others), _generators()
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


@contextmanager
def settling(module: nn.Module, *others: Any) -> Generator[None]:
    """What happens inside may set Python state, which stays; it is put back where an error is raised.

    Raises SideEffectError where a fake tensor is kept.
    """
    before = Snapshot.of(module, *others)
    try:
        yield
        for path, part in module.named_modules():
            for key, value in _own(part):
                if any(isinstance(x, FakeTensor) for x in leaves_in(vars(value) if _is_users(value) else value)):
                    raise side_effect(f"to keep {path}.{key}", "it", "another", "a tensor without numbers")
    except BaseException:
        before.restore()
        raise


@contextmanager
def undrawn() -> Generator[None]:
    """Behind it Python's, NumPy's and torch's generators are where they were before."""
    drawn = _generators()
    try:
        yield
    finally:
        _set_generators(drawn)


def _own(part: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in part.__dict__.items():
        if key not in _PASSED_OVER and "_hooks" not in key:
            yield key, value


def _look(value: Any, depth: int = _DEPTH, objects: int = _OBJECTS) -> Any:
    """What can be compared later: numbers and texts by value, containers by what they hold, the rest by identity."""
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, Tensor):
        return (id(value), 0 if value.is_inference() else value._version)
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
    return (isinstance(value, (Tensor, Mapping, Sequence, set)) and not isinstance(value, _PLAIN)) or _is_users(value)


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
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray(ours), dtype=torch.uint8))
