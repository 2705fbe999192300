"""What a forward pass changes beside tensors: Python state that a program would freeze, found by looking twice."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ._errors import SideEffectError

_TABLES = {"_parameters", "_buffers", "_modules"}
_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Module → its attributes and what they looked like; the names of its parts; the state of Python's generators."""

    attributes: Mapping[str, Mapping[str, tuple[Any, Any]]]
    parts: Mapping[str, tuple[str, ...]]
    drawn: tuple[Any, Any]

    @classmethod
    def of(cls, module: nn.Module) -> Snapshot:
        named = dict(module.named_modules())
        attributes = {path: {k: (v, _look(v)) for k, v in _own(part)} for path, part in named.items()}
        return cls(attributes, {path: _parts(part) for path, part in named.items()}, _generators())

    def compare(self, module: nn.Module) -> None:
        """Raises SideEffectError for the first thing that changed, after putting everything back."""
        found = list(self._changes(module))
        if not found:
            return
        what, before, after = found[0]
        raise SideEffectError(
            f"to capture the forward pass of {type(module).__name__}", f"{what} was {before}, and is {after} after it",
            "a program is recorded once: what Python changes in each pass would stay as it was then",
            "a buffer (register_buffer) that is changed by tensor operations, or Strategy(full_graph=False)",
        )  # fmt: skip

    def _changes(self, module: nn.Module) -> Iterator[tuple[str, str, str]]:
        for path, part in module.named_modules():
            if path not in self.parts or _parts(part) != self.parts[path]:
                yield f"the parts of {path or 'the module'}", str(self.parts.get(path)), str(_parts(part))
                continue
            yield from self._attributes(path, part)
        if _generators() != self.drawn:
            random.setstate(self.drawn[0])
            np.random.set_state(_numpy_state(self.drawn[1]))
            yield "the state of Python's or NumPy's random generator", "another", "advanced"

    def _attributes(self, path: str, part: nn.Module) -> Iterator[tuple[str, str, str]]:
        before = self.attributes[path]
        after = dict(_own(part))
        for key in [*before, *(k for k in after if k not in before)]:
            was, look = before.get(key, (None, None))
            if key in before and key in after and _look(after[key]) == look:
                continue
            name = f"{path}.{key}".lstrip(".")
            yield name, _short(was) if key in before else "not there", _short(after.get(key))
            if key in before:
                part.__dict__[key] = was
            else:
                part.__dict__.pop(key, None)


def _own(part: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in part.__dict__.items():
        if key not in _TABLES and not key.endswith("_hooks"):
            yield key, value


def _parts(part: nn.Module) -> tuple[str, ...]:
    return (*part._modules, *part._parameters, *part._buffers)


def _look(value: Any, depth: int = _DEPTH) -> Any:
    """What can be compared later: numbers and texts by value, containers by what they hold, the rest by identity."""
    if isinstance(value, (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)):
        return (type(value), value)
    if isinstance(value, Tensor):
        return (id(value), value._version)
    if depth and isinstance(value, Mapping):
        return tuple((_look(k, depth - 1), _look(v, depth - 1)) for k, v in value.items())
    if depth and isinstance(value, (Sequence, set, frozenset)):
        return (type(value), *[_look(v, depth - 1) for v in value])
    return id(value)


def _short(value: Any) -> str:
    text = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) < 80 else text[:77] + "..."


def _generators() -> tuple[Any, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (kind, bytes(np.asarray(keys)), *rest)


def _numpy_state(state: Any) -> Any:
    kind, keys, *rest = state
    return (kind, np.frombuffer(keys, dtype=np.uint32), *rest)
