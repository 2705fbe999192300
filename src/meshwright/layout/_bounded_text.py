"""Bounded reading of JSON and TOML: length, nesting depth and numbers are limited; keys must be unique in a table.

The checks before the parser take time linear in the length of the text, for any content.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from math import isfinite, isnan
from typing import Any, NoReturn, TypeVar, cast

from ._bounded_file import MOST_TEXT
from ._errors import InputError
from ._untyped import JsonValue

DEPTH = 64
"""Maximum nesting depth of lists and tables."""
MOST_VALUES = 500_000
"""Maximum number of values in a JSON text: a text of empty tables takes sixty times its length in memory."""
MOST_DIGITS = 40
"""Maximum number of digits of an integer in a text."""
MOST_WHOLE = 2**64
"""Exclusive upper bound of the absolute value of integers in JSON and TOML."""

_JSON_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_DIGITS = re.compile(rb"[0-9]{%d,}" % (MOST_DIGITS + 1))
_NO_BRACKETS = bytes(c for c in range(256) if c not in b"[]{}")
_AS_SQUARE = bytes.maketrans(b"{}", b"[]")

_TOML_STRING = re.compile(
    r"""\#[^\n]*+ | \"{3}(?:[^"\\]|\\.|"(?!""))*+(?:\"{3})? | '{3}(?:[^']|'(?!''))*+(?:'{3})?"""
    r"""| "(?:[^"\\\n]|\\.)*+"? | '[^'\n]*+'?""",
    re.DOTALL | re.VERBOSE,
)
"""Comments and strings of TOML. An unterminated string matches the rest of the text, so that the time is linear."""
MOST_WORD = 200
_LONG_WORD = re.compile(rf"[\w+:-]{{{MOST_WORD + 1}}}")
_LONG_KEY = re.compile(rf"(?:(?:''|[\w-]++)[ \t]*+\.[ \t]*+){{{DEPTH}}}")

T = TypeVar("T")


def check_length(text: str, most: int, what: str, write: str) -> None:
    """Raise InputError if the text is longer than `most` characters."""
    if len(text) > most:
        raise InputError(what, f"a text of {len(text)} characters", f"such a text has at most {most} characters", write)


def read_json(text: str | bytes, most: int = MOST_TEXT, values: int = MOST_VALUES, depth: int = DEPTH) -> JsonValue:
    """Return the parsed JSON text.

    Raises:
        InputError: the text is not JSON in UTF-8, has more than `most` bytes or `values` values, is nested deeper than
            `depth` levels, has a number that is too long or not finite, or has a key twice in one object.
    """
    try:
        data = text.encode() if isinstance(text, str) else text
        _check_json(data, most, values, depth)
        return json.loads(
            data.decode(), parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_without_repeats
        )
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise _refused("JSON", _error_text(error), "the text is not JSON in UTF-8") from error


def _check_json(data: bytes, most: int, values: int, depth: int) -> None:
    if len(data) > most:
        raise _refused("JSON", f"{len(data)} bytes", f"such a text has at most {most} bytes")
    if (strings := (data.count(b'"') - data.count(b'\\"')) // 2) > 2 * values:
        raise _refused("JSON", f"{strings} strings", f"such a text has at most {2 * values} strings")
    plain = _JSON_STRING.sub(b"", data)
    if _DIGITS.search(plain):
        raise _refused(
            "JSON", f"a number with more than {MOST_DIGITS} digits", f"a number has at most {MOST_DIGITS} digits"
        )
    if (count := sum(map(plain.count, (b",", b"[", b"{")))) > values:
        raise _refused("JSON", f"{count} values", f"such a text has at most {values} values")
    brackets = plain.translate(_AS_SQUARE, _NO_BRACKETS)
    for _ in range(depth):
        if not brackets or brackets.count(b"[") * 2 != len(brackets):
            break
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        why = f"values are nested in at most {depth} levels, and every bracket is closed"
        raise _refused("JSON", f"values in more than {depth} levels, or an unclosed bracket", why)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise _refused("JSON", f"the key {twice!r} twice in one object", "each key has one value")
    return found


def _no_constant(name: str) -> NoReturn:
    raise _refused("JSON", name, "JSON has finite numbers only")


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise _refused("JSON", text[:20], "the number is too large")
    return number


def read_toml(text: str, most: int = MOST_TEXT // 16) -> dict[str, Any]:
    """Return the parsed TOML text. Raises InputError for the same reasons as `read_json`; infinities are allowed."""
    check_length(text, most, "a text in TOML", "use a shorter text")
    plain = _TOML_STRING.sub("''", text)
    if _LONG_WORD.search(plain):
        raise _refused(
            "TOML",
            f"a word of more than {MOST_WORD} characters",
            f"a number or a key has at most {MOST_WORD} characters",
        )
    if _LONG_KEY.search(plain):
        raise _refused("TOML", f"a key with more than {DEPTH} parts", f"a key has at most {DEPTH} parts")
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused("TOML", _error_text(error), "the text is not TOML") from error
    return check_values(found, "TOML")


def check_values(found: T, what: str) -> T:
    """Return the data unchanged. Raises InputError if its depth or its numbers exceed the bounds."""
    level: Sequence[Any] = [found]
    for _ in range(DEPTH):
        if not level:
            return found
        level = [x for each in level for x in _items_inside(each, what)]
    raise _refused(what, f"values in more than {DEPTH} levels", f"values are nested in at most {DEPTH} levels")


def _items_inside(value: JsonValue, what: str) -> Sequence[JsonValue]:
    """Return the items of a list or table, none for other values. Raises InputError for a number out of bounds."""
    if isinstance(value, dict):
        return list(cast(dict[str, Any], value).values())
    if isinstance(value, int) and abs(value) >= MOST_WHOLE:
        raise _refused(what, f"a number of {value.bit_length()} bits", f"integers are below {MOST_WHOLE}")
    if isinstance(value, float) and isnan(value):
        raise _refused(what, "nan", "NaN is not allowed")
    return cast(list[Any], value) if isinstance(value, list) else ()


def _error_text(error: Exception) -> str:
    return "values nested too deep" if isinstance(error, RecursionError) else str(error)[:300]


def _refused(what: str, found: str, why: str) -> InputError:
    return InputError(f"a text in {what}", found, why, f"use valid {what} within these limits")
