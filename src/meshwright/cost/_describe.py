"""Parser for a cluster that is written as one line of text or as a TOML file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from os.path import exists
from pathlib import Path
from typing import cast

from meshwright.layout import InputError, JsonValue, LayoutError, read_dtype, read_text_file, read_toml

from ._cluster import Cluster, cluster_of, slowest
from ._device import DEVICES, GIGA, MICRO, TERA, Device
from ._errors import CostError
from ._link import LINKS, Link

WRITE = "write 64xH100, or 64xA100-40GB, 8 per node, 200G (gigabits per second and device between nodes, or EFA-400)"
MOST_CHARACTERS = 4000
RACK = 72
"""Devices of an NVL72 rack, whose links all of them share."""
_DEVICES = re.compile(r"(\d{1,40}) ?[x×*] ?(\w[\w .-]*)")
_WORD = re.compile(r"([- ]?)([^- ]+)")
_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)G(B?)")
_SOCKET = re.compile(r"sxm\d?|nvl72")
"""Words of data sheets that do not distinguish the devices in `DEVICES`."""
_NODE = re.compile(r"(\d{1,12}) ?(?:per node|/ ?node)")
_NETWORK = re.compile(r"(\d{1,12}(?:\.\d{1,12})?) ?([GT])(b/s|bps|bit/s|B/s)?")
_GIGABITS = {"G": 1.0, "T": 1000.0}


def cluster(text: str) -> Cluster:
    """Return the cluster that one line describes, or a TOML file if `text` is its path.

    >>> cluster("64xA100-40G, 4 per node, 100G")
    64 x A100-40GB: 312 TFLOP/s bf16, 19.5 TFLOP/s f32, 1555 GB/s, 40 GB; 4 per node on NVLink3; 100G between nodes

    Devices of several kinds ("8xH100 + 8xA100") work in step, each as fast as the slowest of them (`slowest`).

    Raises:
        CostError: the text or the file cannot be read, or a number in it is impossible.
    """
    if len(text) > MOST_CHARACTERS:
        why = f"a cluster in text has at most {MOST_CHARACTERS} characters"
        raise CostError(f"a cluster {text[:40]!r}", f"{len(text)} characters", why, WRITE)
    return _from_file(Path(text)) if text.endswith(".toml") else _from_line(text.strip())


def _from_line(text: str) -> Cluster:
    first, *rest = (word.strip() for word in text.split(","))
    kinds = [_cluster_of_kind(text, word.strip()) for word in first.split("+")]
    made = kinds[0] if len(kinds) == 1 else slowest(kinds)
    for is_one in (_NODE.fullmatch, lambda word: word in LINKS or _NETWORK.fullmatch(word)):
        if len(twice := [word for word in rest if is_one(word)]) > 1:
            raise CostError(f"a cluster {text!r}", " and ".join(map(repr, twice)), "only one of them is allowed", WRITE)
    for word in rest:
        made = _with_word(made, text, word)
    return made


def _cluster_of_kind(text: str, word: str) -> Cluster:
    """Return the cluster of one kind of device, written as a count and a name."""
    found = _DEVICES.fullmatch(word)
    if found is None:
        raise _no_toml_error(text) if text and exists(text) else _unread_error(text, word)
    return replace(_usual_cluster(text, found[2]), devices=int(found[1]))


def _usual_cluster(text: str, written: str) -> Cluster:
    """Return the usual cluster of a device.

    A memory size in the name selects the device with that memory. If there is none, it replaces the device's memory.
    """
    words, size = list[str](), ""
    for before, word in _WORD.findall(written):
        number = _SIZE.fullmatch(word)
        if words and number and (before == "-" or number[2]):  # the 80G of "A100 80G" might be a network
            size = _positive(text, word, number[1])
        elif not _SOCKET.fullmatch(word.casefold()):
            words.append(word)
    name = "-".join(words)
    usual = cluster_of(_known_name(f"{name}-{size}GB") or _known_name(name) or written)
    if usual.per_node < RACK and "nvl72" in written.casefold():
        why = f"{usual.device.name} has nodes of {usual.per_node}; a rack of {RACK} has GB200 or GB300"
        raise CostError(f"a cluster {text!r}", repr(written), why, f"write {RACK}xGB200")
    return replace(usual, device=replace(usual.device, memory=float(size) * GIGA)) if size else usual


def _known_name(name: str) -> str | None:
    """Return a device's name as `DEVICES` spells it, whatever the case of `name`; None if it is unknown."""
    return {known.casefold().replace(" ", "-"): known for known in DEVICES}.get(name.casefold())


def _with_word(made: Cluster, text: str, word: str) -> Cluster:
    if found := _NODE.fullmatch(word):
        return replace(made, per_node=int(_positive(text, word, found[1])))
    if found := _NETWORK.fullmatch(word):
        usual = made.outside or Link("", 1.0, 14 * MICRO, reach=0.77)
        bits = float(_positive(text, word, found[1])) * _GIGABITS[found[2]] * (8 if found[3] == "B/s" else 1)
        return replace(made, outside=replace(usual, name=f"{bits:g}G", bandwidth=bits / 8 * GIGA))
    if word in LINKS:
        return replace(made, outside=LINKS[word])
    raise _unread_error(text, word)


def _positive(text: str, word: str, number: str) -> str:
    if not float(number):
        raise CostError(f"a cluster {text!r}", f"{word!r}", "the number must be above 0", WRITE)
    return number


def _no_toml_error(text: str) -> CostError:
    return CostError(
        f"a cluster {text!r}", "a path", "the name of a cluster file must end in .toml", "pass a file such as here.toml"
    )


def _unread_error(text: str, word: str) -> CostError:
    why = "the word is neither a number of devices, nodes or gigabits, nor a link"
    return CostError(f"a cluster {text!r}", f"{word!r}", why, WRITE)


def _from_file(path: Path) -> Cluster:
    try:
        given = read_toml(read_text_file(path))
    except InputError as error:
        why = f"the file cannot be read as TOML: {error.why}"
        raise CostError(f"a cluster from {path}", error.found, why, WRITE) from error
    asked, tables = f"a cluster from {path}", ("device", "inside", "outside")
    if strange := set(given) - {"cluster", *tables}:
        raise CostError(
            asked, f"tables {', '.join(sorted(strange))}", f"the known names are cluster, {', '.join(tables)}", EXAMPLE
        )
    if not isinstance(given.get("cluster"), str):
        raise CostError(
            asked, f"cluster = {given.get('cluster')!r}", "cluster must be a line that describes the devices", EXAMPLE
        )
    made = _from_line(given["cluster"])
    return replace(made, **{name: _changed_part(asked, name, made, given[name]) for name in tables if name in given})


EXAMPLE = """write lines such as
cluster = "64xH100, 8 per node, 400G"
[device]
memory = 96        # GB
bandwidth = 2400   # GB/s
reach = 0.57
flops = { bf16 = 989.5, float8_e4m3fn = 1979 }  # TFLOP/s
[outside]
latency = 10       # microseconds"""
_UNITS = {
    "memory": GIGA, "bandwidth": GIGA, "latency": MICRO, "start": MICRO, "overhead": MICRO, "switching": MICRO,
}  # fmt: skip


def _changed_part(asked: str, table: str, made: Cluster, given: JsonValue) -> Device | Link:
    """Return the cluster's device or one of its links, with some numbers replaced."""
    old = getattr(made, table) or Link("", 1.0, 14 * MICRO)
    known = {field.name for field in fields(old)}
    if not isinstance(given, Mapping):
        raise CostError(asked, f"{table} = {given!r}", "the entry must be a table of numbers", EXAMPLE)
    numbers = cast(Mapping[str, JsonValue], given)
    if strange := sorted(set(numbers) - known):
        near = get_close_matches(strange[0], known, n=1, cutoff=0.0)[0]
        raise CostError(
            asked,
            f"{strange[0]} in [{table}]",
            f"the known names are {', '.join(sorted(known))}; the closest is {near}",
            EXAMPLE,
        )
    if {"latency", "start"} & set(numbers) and isinstance(old, Link):
        numbers = {"lines": (), **numbers}  # a latency in the file holds for messages of every kind
    try:
        return replace(old, **{name: _field_value(old, name, value) for name, value in numbers.items()})
    except CostError:
        raise
    except (LayoutError, TypeError, ValueError, AttributeError) as error:
        raise CostError(asked, f"[{table}]: {error}", "a number is needed here", EXAMPLE) from error


def _number_pair(value: JsonValue, unit: float = 1.0) -> tuple[float, float]:
    one, other = value
    return float(one) * unit, float(other) * unit


_PAIRS: Mapping[str, Callable[[JsonValue], object]] = {
    "attention": _number_pair,
    "addressable": lambda value: _number_pair(value, GIGA),
    "lines": lambda value: _number_pair(value, MICRO) if value else None,
    "fewer": lambda value: tuple((int(ranks), float(part)) for ranks, part in value),
}
"""Fields that are written as pairs of numbers, with the functions that read them."""


def _field_value(old: Device | Link, name: str, value: JsonValue) -> object:
    """Return the value of a field in a table, in seconds and bytes."""
    if isinstance(old, Device) and name == "flops":
        return {**old.flops, **{read_dtype(t): float(x) * TERA for t, x in value.items()}}
    if name in ("name", "source"):
        return str(value)
    if name in _PAIRS:
        return _PAIRS[name](value)
    return float(value) * _UNITS.get(name, 1.0)
