"""Print answers: text without control characters, and with `--json` one object on one line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import IO, Any, cast

from meshwright.layout import escaped


def print_text(told: object, end: str = "\n", file: IO[str] | None = None) -> None:
    """Print the text without control characters other than newlines: names in files could control a terminal."""
    print(escaped(str(told), keep_lines=True), end=end, file=file)


def print_json(told: Mapping[str, Any]) -> None:
    """Print the object as JSON. A number that is not finite becomes a string, because JSON has none."""
    print(json.dumps(_finite(told), allow_nan=False))


def _finite(value: Any) -> Any:
    """Return the value with `repr` of the numbers that JSON does not have.

    >>> _finite({"losses": [1.0, float("nan")], "mesh": (2, 4)})
    {'losses': [1.0, 'nan'], 'mesh': [2, 4]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {str(name): _finite(x) for name, x in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [_finite(x) for x in cast(list[Any], value)]
    return value
