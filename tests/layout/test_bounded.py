"""Files and texts are read within bounds, which the errors name; control characters are never shown."""

from __future__ import annotations

import importlib
import os
import pkgutil
from enum import Enum, StrEnum
from pathlib import Path

import numpy as np
import pytest

import meshwright
from meshwright.layout import (
    Cache,
    InputError,
    MeshwrightError,
    escaped,
    inside,
    read_file,
    read_json,
    read_text_file,
    read_toml,
    write_toml,
)
from meshwright.layout._escape import CONTROLS

CONTROL_CHARACTERS = "".join(chr(c) for first, last in CONTROLS for c in (first, last))


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("[" * 100_000, "64 levels"),
        ("[" * 65 + "]" * 65, "64 levels"),
        ('{"a": 1, "a": 2}', "one value"),
        ("[NaN]", "finite"),
        ("[-Infinity]", "finite"),
        ("[1e999]", "too large"),
        ("[" + "9" * 41 + "]", "40 digits"),
        ('"' + '\\"' * 1000, "not JSON"),
        (b"[\xff]", "UTF-8"),
        ("[" + "1," * 500_001 + "1]", "500000"),
        (" " * (2**24 + 1), "16777216"),
    ],
)
def test_json_names_its_bound(text: str | bytes, bound: str) -> None:
    with pytest.raises(InputError, match=bound):
        read_json(text)


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("a." * 100_000 + "a = 1", "64 parts"),
        ("x = 0x" + "f" * 100_000, "200 characters"),
        ("x = 0x" + "f" * 40, "18446744073709551616"),
        ("x = nan", "NaN is not allowed"),
        ("x = " + "[" * 5000, "too deep|nested"),
        ("x = " + "[" * 70 + "]" * 70, "64 levels"),
        ("a = 1\na = 2", "not TOML"),
        (" " * (2**20 + 1), "1048576"),
    ],
)
def test_toml_names_its_bound(text: str, bound: str) -> None:
    with pytest.raises(InputError, match=bound):
        read_toml(text)


def test_valid_texts_are_read() -> None:
    assert read_json('{"a": [1, 2.5, "[[[\\"{"], "b": {"c": null}}') == {"a": [1, 2.5, '[[["{'], "b": {"c": None}}
    text = '# [[[[ "\nx = "#\'"\ny = \'"\'\nz = """a"b""c"""\n[t]\n"a b".c = [1.5, inf]\n'
    assert read_toml(text) == {"x": "#'", "y": '"', "z": 'a"b""c', "t": {"a b": {"c": [1.5, float("inf")]}}}


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "nowhere", "large", "link"])
def test_only_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    path, links = tmp_path / "file", True
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        path.write_bytes(b"")
        os.truncate(path, 2**40)
    elif kind in ("device", "link"):
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "other")
        (tmp_path / "other").write_text("here")
        links = kind == "device"
    with pytest.raises(InputError) as caught:
        read_file(path, 100, links=links)
    assert all((caught.value.asked, caught.value.found, caught.value.why, caught.value.write))


def test_text_must_be_utf8(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a\xff")
    with pytest.raises(InputError, match="0xff at 1"):
        read_text_file(tmp_path / "a")


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/etc/passwd", "a\\b", "a\0b", "../a", "link", 3, None])
def test_names_outside_their_folder_are_refused(name: object, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(InputError, match="in the folder itself"):
        inside(tmp_path, name)
    assert inside(tmp_path, "good") == tmp_path / "good"


def test_a_cache_keeps_its_bound() -> None:
    cache = Cache[int, int](8)
    for n in range(1000):
        cache[n] = n
        cache.setdefault(n - 1, n)
        assert len(cache) <= 8
        assert cache[n] == n


def error_classes() -> list[type[MeshwrightError]]:
    """Return every class of error, found by its base class in all modules of the package."""
    for module in pkgutil.walk_packages(meshwright.__path__, "meshwright."):
        if not module.name.endswith(("__main__", "_measure", "_cp_sat_worker")):
            importlib.import_module(module.name)
    found, queue = set[type[MeshwrightError]](), [MeshwrightError]
    while queue:
        queue += (kind := queue.pop()).__subclasses__()
        found.add(kind)
    return sorted(found, key=lambda kind: kind.__name__)


def test_no_error_shows_control_characters() -> None:
    hostile = f"name{CONTROL_CHARACTERS}\n  fix:   rm -rf"
    classes = error_classes()
    assert len(classes) > 40
    for kind in classes:
        error = kind.__new__(kind)
        error.asked = error.found = error.why = error.write = hostile
        text = str(error)
        assert not set(CONTROL_CHARACTERS) - {"\n", "\t"} & set(text), kind
        assert sum(line.startswith("  fix:   ") for line in text.split("\n")) == 1, kind
        assert text.translate({9: None, 10: None}).isprintable(), kind


def test_control_characters_are_shown_as_escapes() -> None:
    assert escaped("a\x1b[2J\n\u202eb") == "a\\x1b[2J\\x0a\\u202eb"
    assert escaped("a\tb\nc", keep_lines=True) == "a\tb\nc"
    assert escaped("größe ✓ 数") == "größe ✓ 数"


class Stage(int, Enum):
    TWO = 2


class Name(StrEnum):
    FIRST = "first"


def test_subclasses_of_plain_values_are_written_as_plain_values() -> None:
    values = {"stage": Stage.TWO, "name": Name.FIRST, "list": (np.float64(0.5), True), "table": {"a": [Stage.TWO]}}
    assert read_toml(write_toml(values)) == {"stage": 2, "name": "first", "list": [0.5, True], "table": {"a": [2]}}


@pytest.mark.parametrize("value", [None, 1j, {1, 2}, [object()]])
def test_values_that_toml_cannot_hold_are_refused_by_name(value: object) -> None:
    with pytest.raises(InputError, match=r"table\.x in TOML"):
        write_toml({"table": {"x": value}})
