"""Malformed and malicious inputs: bytes made from a good sample, values put into data, and files of odd kinds.

Every input follows from a seed and a number, so that a finding can be reproduced.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

LARGE = 64 * 2**20
"""Bytes of an oversized text."""
OUTSIDE = "outside.txt"
"""Name of a file beside the folder of a case, which nothing may write."""

HOSTILE_WORDS = (
    "../" * 3 + OUTSIDE, "../" + OUTSIDE, "/etc/passwd", "/dev/zero", "..", ".", "", "\0", "a\0b", "\x1b[2J\x1b[31m",
    "\u202eevil", "a\nfix:  b", "\r\n", "\ud800", "\ufeff", "é" * 300, "x" * 100_000, "%s%n", "{0.__class__}",
    "__import__('os').system('true')", "aten.from_file.default", "aten.set_.source_Tensor", "prim.Print.default",
    "_c10d_functional.all_reduce.default", "os.system", "cuda:99", "meta", "nan", "float8_e4m3fn", "quint8",
    "f32[99999999 * 2@world]", "[99999999 * 2@dp]", "f32[64 * 99999999@world, 4]",
)  # fmt: skip
HOSTILE_NUMBERS = (
    0, -1, -(2**31), 2**31, 2**40, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 1e308, -0.0, 5e-324,
    0.5, 1e999, float("nan"), True,
)  # fmt: skip
TOKENS = (
    b"{", b"}", b"[", b"]", b'"', b"'", b",", b":", b"=", b"\\", b"\n", b"#", b"@", b"*", b"+", b"~", b"->", b"..",
    b".", b"\0", b"\xff", b"\xed\xa0\x80", b"\x1b[0m", b"NaN", b"Infinity", b"1e999", b"-1", b"0", b"9" * 30,
    b"9" * 5000, b"9" * 200_000, b"true", b"null", b'"""', b"[[", b"<", b">", b"&", b"(", b")", b"\xe2\x80\xae",
    b" " * 1000,
)  # fmt: skip
Change = Callable[[random.Random, bytes], bytes]


def _cut(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _flip(draw: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        if found:
            found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    return bytes(found)


def _insert(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.choice(TOKENS) * draw.choice((1, 1, 2, 70)) + data[at:]


def _remove(draw: random.Random, data: bytes) -> bytes:
    at, to = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return data[:at] + data[to:]


def _double(draw: random.Random, data: bytes) -> bytes:
    at, to = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    times = draw.choice((2, 2, 3, max(1, min(20_000, 2**21 // max(1, to - at)))))
    return data[:at] + data[at:to] * times + data[to:]


def _number(draw: random.Random, data: bytes) -> bytes:
    places = [i for i, byte in enumerate(data) if 48 <= byte < 58]
    if not places:
        return _insert(draw, data)
    at = draw.choice(places)
    to = at
    while to < len(data) and 48 <= data[to] < 58:
        to += 1
    return data[:at] + str(draw.choice(HOSTILE_NUMBERS)).encode() + data[to:]


def _noise(draw: random.Random, data: bytes) -> bytes:
    return draw.randbytes(draw.choice((0, 1, 8, 300, 5000)))


def _deep(draw: random.Random, data: bytes) -> bytes:
    pairs = ((b"[", b"]"), (b'{"a":', b"}"), (b"{a=", b"}"), (b"a.", b"=1"), (b"(", b")"), (b"&", b""))
    opening, closing = draw.choice(pairs)
    depth = draw.choice((70, 1100, 100_000, 500_000))
    at = draw.randrange(len(data) + 1)
    middle = opening * depth + (b"1" + closing * depth if draw.random() < 0.5 else b"")
    return draw.choice((middle, b"x = " + middle, data[:at] + middle + data[at:]))


def _many(draw: random.Random, data: bytes) -> bytes:
    unit = draw.choice((b"[],", b"{},", b'{"a":1},', b"0,", b"\n", b"a=1\n", b"[[a]]\n", b'"', b"'\n", b"F0.0 ", b"x "))
    return draw.choice((b"", b"[", b"x=[", data)) + unit * (draw.choice((2**12, 2**20, 2**23)) // len(unit))


def _large(draw: random.Random, data: bytes) -> bytes:
    return draw.choice((b"x", b"[", b"9", b" ", b"\0", data or b"a")) * (LARGE // max(1, len(data or b"a")))


CHANGES: tuple[tuple[Change, int], ...] = (
    (_cut, 4), (_flip, 6), (_insert, 6), (_remove, 4), (_double, 4), (_number, 6), (_noise, 2), (_deep, 3), (_many, 3),
    (_large, 1),
)  # fmt: skip
"""Ways to spoil a sample, and how often each is drawn."""


def spoiled(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """Return the name of a change, and the changed sample."""
    change = draw.choices([c for c, _ in CHANGES], [n for _, n in CHANGES])[0]
    return change.__name__.strip("_"), change(draw, data)


def spoiled_data(draw: random.Random, data: Any) -> Any:
    """Return the JSON data with one random change: a hostile value, a missing value, or one that occurs twice."""
    found = json.loads(json.dumps(data))
    places = list(_places(found))
    holder, key = draw.choice(places)
    kind = draw.random()
    if kind < 0.1:
        del holder[key]
    elif kind < 0.2:
        holder[key] = [holder[key]] * draw.choice((2, 50, 10_000))
    elif kind < 0.3:
        other, name = draw.choice(places)
        if name in (other if isinstance(other, dict) else range(len(other))):
            holder[key] = json.loads(json.dumps(other[name]))
    else:
        holder[key] = _value(draw, holder[key])
    return found


def _value(draw: random.Random, old: Any) -> Any:
    same_kind = HOSTILE_WORDS if isinstance(old, str) else HOSTILE_NUMBERS
    others: tuple[Any, ...] = (*HOSTILE_WORDS, *HOSTILE_NUMBERS, None, [], {}, [[]], {"%": 2**40})
    return draw.choice((*same_kind, *same_kind, *others))


def _places(tree: Any) -> Any:
    """Yield each list or table with each of its keys."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield tree, key
        yield from _places(value)


ODD_KINDS = ("pipe", "endless", "folder", "nowhere", "loop", "sparse", "other", "socket")


def put_odd(kind: str, path: Path) -> None:
    """Put a file of an odd kind in the place of `path`."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(2**43)
    elif kind == "socket":
        os.mknod(path, 0o140600)
    else:
        target = {"endless": "/dev/zero", "nowhere": "gone", "loop": path.name, "other": f"../{OUTSIDE}"}[kind]
        path.symlink_to(target)
