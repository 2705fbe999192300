"""Parser of the text form of schedules."""

from __future__ import annotations

import re

from .._errors import ScheduleError
from .action import parse_action
from .schedule import Edge, Schedule

_HEAD = re.compile(r"(?P<name>.+): (?P<m>\d{1,9}) microbatch(es)?")
MOST_CHARACTERS = 4 * 2**20
MOST_WORDS = 300_000
"""Upper bound on the words of a table in text form, most of which are actions."""
_WORD = re.compile(r"\S+")
_EDGE = re.compile(r"(\d{1,9})>(\d{1,9})(-?)")


def parse_schedule(text: str) -> Schedule:
    """Return the schedule that `text` describes; the inverse of `str`. Raises ScheduleError for any other text.

    >>> print(parse_schedule("mine: 1 microbatch\\nway: 0 1\\n0: F0.0 BW0.0\\n1: F0.1 BW0.1"))
    mine: 1 microbatch
    way: 0 1
    0: F0.0 BW0.0
    1: F0.1 BW0.1
    """
    _check_length(text)
    lines = [line for line in (raw.split("#")[0].strip() for raw in text.splitlines()) if line]
    head = _head(lines[0] if lines else "")
    parts = _words_by_key(lines[1:])
    return Schedule(
        head["name"],
        tuple(_numbers(way) for way in parts.pop("way", [])) or _no_way(),
        int(head["m"]),
        routes=_numbers(_one("routes", parts.pop("routes", [[]]))),
        edges=tuple(map(_edge, _one("edges", parts.pop("edges", [[]])))),
        versions=_numbers(_one("versions", parts.pop("versions", [[]]))),
        rows=tuple(tuple(map(parse_action, _one(str(r), row))) for r, row in enumerate(_rows(parts))),
    )


def _check_length(text: str) -> None:
    if len(text) > MOST_CHARACTERS or len(_WORD.findall(text)) > MOST_WORDS:
        why = f"a table has at most {MOST_CHARACTERS} characters and {MOST_WORDS} words"
        raise _unread(f"{len(text)} characters", why, "use a table with fewer microbatches")


def _head(line: str) -> re.Match[str]:
    found = _HEAD.fullmatch(line)
    if found is None:
        raise _unread(line, "the first line must name the schedule", "write 1F1B: 8 microbatches")
    if not found["name"].isprintable():
        raise _unread(repr(line), "the name of a schedule must be printable", "write 1F1B: 8 microbatches")
    return found


def _words_by_key(lines: list[str]) -> dict[str, list[list[str]]]:
    """Map the rank or the name before each colon to the words behind it, line by line."""
    parts: dict[str, list[list[str]]] = {}
    for line in lines:
        key, colon, rest = line.partition(":")
        if not colon:
            raise _unread(line, "a line must begin with a rank or a name and a colon", "write 0: F0.0 BW0.0")
        parts.setdefault(key, []).append(rest.split())
    return parts


def _rows(parts: dict[str, list[list[str]]]) -> list[list[list[str]]]:
    if set(parts) != {str(rank) for rank in range(len(parts))}:
        raise _unread(
            ", ".join(parts),
            "after the head come way, routes, edges, versions and one row for each rank from 0 on",
            "write lines such as\nway: 0 1\n0: F0.0 BW0.0\n1: F0.1 BW0.1",
        )
    return [parts[str(rank)] for rank in range(len(parts))]


def _one(key: str, found: list[list[str]]) -> list[str]:
    if len(found) != 1:
        raise _unread(f"{key}: (twice)", "this line may occur only once", "write one line")
    return found[0]


def _edge(text: str) -> Edge:
    found = _EDGE.fullmatch(text)
    if found is None:
        raise _unread(text, "an edge leads to a later chunk; a minus means no gradient", "write 0>1 or 0>2-")
    return Edge(int(found[1]), int(found[2]), not found[3])


def _numbers(words: list[str]) -> tuple[int, ...]:
    if not all(word.isdecimal() and len(word) < 10 for word in words):
        raise _unread(" ".join(words), "ranks, ways and versions must be numbers", "write 0 1 2")
    return tuple(map(int, words))


def _no_way() -> tuple[tuple[int, ...], ...]:
    raise _unread("no line 'way:'", "a schedule must name the rank of each chunk", "write way: 0 1")


def _unread(found: str, why: str, write: str) -> ScheduleError:
    return ScheduleError("a schedule from text", found or "nothing", why, write)
