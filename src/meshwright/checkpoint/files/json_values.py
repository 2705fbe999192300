"""Python values of a state as JSON: numbers, strings, bools, None, and lists, tuples and dicts of them.

JSON has no tuples, no keys other than strings, and no infinities. So a tuple, a dict and a float that is not finite are
objects with one key: `{"tuple": […]}`, `{"dict": [[key, value], …]}`, `{"float": "inf"}`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.layout import JsonValue

from .._errors import CheckpointError

DEEPEST = 100
"""Most levels of nested lists, tuples and dicts."""
_PLAIN = (str, bool, int, type(None))


def encode_value(name: str, value: Any, depth: int = 0) -> JsonValue:
    """Return the value as JSON. Raises CheckpointError, with the name, for a value that JSON cannot hold.

    >>> encode_value("betas", (0.9, math.inf))
    {'tuple': [0.9, {'float': 'inf'}]}
    """
    if depth > DEEPEST:
        raise _too_deep(name)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):  # also NumPy's
        return _encode_float(float(value))
    if type(value) is list:
        return [encode_value(name, v, depth + 1) for v in value]
    if type(value) is tuple:
        return {"tuple": [encode_value(name, v, depth + 1) for v in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_key(name, k), encode_value(name, v, depth + 1)] for k, v in value.items()]}
    raise _no_value(name, value)


def _encode_float(value: float) -> JsonValue:
    return value if math.isfinite(value) else {"float": repr(value)}


def _key(name: str, key: object) -> JsonValue:
    if type(key) in (str, int):
        return key
    raise _no_value(name, key)


def _no_value(name: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"to save {name}",
        f"a {type(value).__name__}",
        "a checkpoint holds data, and no code that rebuilds objects",
        "use tensors, numbers, strings, bools, None, and lists, tuples and dicts of them",
    )


def _too_deep(name: str) -> CheckpointError:
    return CheckpointError(
        f"to save {name}",
        f"a value nested more than {DEEPEST} levels deep",
        "a checkpoint holds flat data",
        "use a value of fewer levels",
    )


def decode_value(value: JsonValue, depth: int = 0) -> Any:
    """Return the value from the JSON of `encode_value`. Raises ValueError for other JSON, or for too many levels.

    >>> decode_value(encode_value("x", {1: (2.0, -math.inf)}))
    {1: (2.0, -inf)}
    """
    if depth > DEEPEST:
        raise ValueError(f"a value is nested more than {DEEPEST} levels deep")
    if isinstance(value, list):
        return [decode_value(v, depth + 1) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, inner),) = value.items()
        if kind in _KINDS:
            return _KINDS[kind](inner, depth + 1)
    raise ValueError(f"{str(list(value))[:80]} is not a value of a checkpoint")


_KINDS: dict[str, Callable[[JsonValue, int], Any]] = {
    "tuple": lambda inner, depth: tuple(decode_value(v, depth) for v in inner),
    "dict": lambda inner, depth: {k: decode_value(v, depth) for k, v in inner},
    "float": lambda inner, depth: _FLOATS[inner],
}
_FLOATS = {text: float(text) for text in ("inf", "-inf", "nan")}
