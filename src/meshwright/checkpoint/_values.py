"""Python values of a state as JSON: numbers, strings, bools, None, and lists, tuples and dicts of them.

JSON has no tuples, no keys but strings, no infinities. So a tuple, a dict and a float that is not finite are objects of
one name: `{"tuple": […]}`, `{"dict": [[key, value], …]}`, `{"float": "inf"}`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ._errors import CheckpointError

_PLAIN = (str, bool, int, type(None))


def encoded(name: str, value: Any) -> Any:
    """The value as JSON; raises CheckpointError for anything that it cannot say, naming the leaf.

    >>> encoded("betas", (0.9, math.inf))
    {'tuple': [0.9, {'float': 'inf'}]}
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):  # also NumPy's
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if type(value) is list:
        return [encoded(name, v) for v in value]
    if type(value) is tuple:
        return {"tuple": [encoded(name, v) for v in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_key(name, k), encoded(name, v)] for k, v in value.items()]}
    raise _no_value(name, value)


def _key(name: str, key: Any) -> Any:
    if type(key) in (str, int):
        return key
    raise _no_value(name, key)


def _no_value(name: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"to save {name}", f"a {type(value).__name__}", "a checkpoint holds data, and no code that makes objects again",
        "tensors, numbers, strings, bools, None, and lists, tuples and dicts of them",
    )  # fmt: skip


def decoded(value: Any) -> Any:
    """What `encoded` made JSON of. Raises ValueError for JSON of another form.

    >>> decoded(encoded("x", {1: (2.0, -math.inf)}))
    {1: (2.0, -inf)}
    """
    if isinstance(value, list):
        return [decoded(v) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, inner),) = value.items()
        if kind in _KINDS:
            return _KINDS[kind](inner)
    raise ValueError(f"{str(value)[:80]} is no value of a checkpoint")


_KINDS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda inner: tuple(decoded(v) for v in inner),
    "dict": lambda inner: {k: decoded(v) for k, v in inner},
    "float": float,
}
