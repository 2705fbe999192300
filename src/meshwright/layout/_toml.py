"""`write_toml`: plain values as a text in TOML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import tomli_w

from ._errors import InputError


def write_toml(values: Mapping[str, object], comments: Iterable[str] = ()) -> str:
    """Return values as TOML that `read_toml` reads, with lines of comments before them.

    Raises:
        InputError: a value is no number, text, truth value, list or mapping, and so TOML cannot hold it.

    >>> print(write_toml({"zero": 1, "mesh": {"dp": 2}}, ["a plan"]), end="")
    # a plan
    zero = 1
    <BLANKLINE>
    [mesh]
    dp = 2
    """
    head = "".join(f"# {''.join(c if c.isprintable() else ' ' for c in comment)}\n" for comment in comments)
    return head + tomli_w.dumps({name: _plain(name, value) for name, value in values.items()})


def _plain(name: str, value: object) -> object:
    """Return a value of Python's own types: a subclass of a number or a text, such as an Enum, may print otherwise."""
    match value:
        case bool():
            return value
        case int():
            return int(value)
        case float():
            return float(value)
        case str():
            return str.__str__(value)
        case Mapping():
            table = cast(Mapping[object, object], value)
            return {str(key): _plain(f"{name}.{key}", each) for key, each in table.items()}
        case Sequence():
            return [_plain(name, each) for each in cast(Sequence[object], value)]
        case _:
            raise _not_plain(name, value)


def _not_plain(name: str, value: object) -> InputError:
    return InputError(
        f"{name} in TOML",
        type(value).__name__,
        "TOML holds numbers, texts, truth values, and lists and tables of them",
        "use a value of such a type",
    )
