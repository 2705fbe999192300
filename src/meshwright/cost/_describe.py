"""A cluster in a line, or in a file: what a person writes to say what there is."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.layout import LayoutError, read_dtype

from ._cluster import Cluster, cluster_of, slowest
from ._device import DEVICES, GIGA, MICRO, TERA
from ._errors import CostError
from ._link import Link

WRITE = "64xH100, or 64xA100-40GB, 8 per node, 200G (gigabits per second and device between nodes)"
_DEVICES = re.compile(r"(\d+) ?x ?([A-Za-z][\w .-]*?)(?:-(\d+)GB?)?")
_NODE = re.compile(r"(\d+) per node")
_NETWORK = re.compile(r"(\d+(?:\.\d+)?)G(?:b/s)?")


def cluster(text: str) -> Cluster:
    """A cluster from one line, or from a TOML file that is named so. Raises CostError for what it can't read.

    >>> cluster("64xA100-40G, 4 per node, 100G")
    64 x A100-40GB: 312 TFLOP/s bf16, 19.5 TFLOP/s f32, 1555 GB/s, 40 GB; 4 to a node on NVLink3; 100G between nodes

    Devices of several kinds ("8xH100 + 8xA100") work in step, each as fast as the slowest of them (`slowest`).
    """
    return _from_file(Path(text)) if text.endswith(".toml") else _from_line(text)


def _from_line(text: str) -> Cluster:
    first, *rest = (word.strip() for word in text.split(","))
    kinds = [_kind(text, word.strip()) for word in first.split("+")]
    made = kinds[0] if len(kinds) == 1 else slowest(kinds)
    for word in rest:
        made = _changed(made, text, word)
    return made


def _kind(text: str, word: str) -> Cluster:
    """Devices of one kind."""
    found = _DEVICES.fullmatch(word)
    if found is None:
        raise _unread(text, word)
    count, name, size = found.groups()
    return replace(_usual(name, size), devices=int(count))


def _usual(name: str, size: str | None) -> Cluster:
    """The device's usual cluster; a size of memory picks the device of that size, or changes it."""
    if size is None:
        return cluster_of(name)
    if f"{name}-{size}GB" in DEVICES:
        return cluster_of(f"{name}-{size}GB")
    usual = cluster_of(name)
    return replace(usual, device=replace(usual.device, memory=int(size) * GIGA))


def _changed(made: Cluster, text: str, word: str) -> Cluster:
    if found := _NODE.fullmatch(word):
        return replace(made, per_node=int(found[1]))
    if found := _NETWORK.fullmatch(word):
        usual = made.outside or Link("", 1.0, 14 * MICRO, reach=0.77)
        return replace(made, outside=replace(usual, name=f"{found[1]}G", bandwidth=float(found[1]) / 8 * GIGA))
    raise _unread(text, word)


def _unread(text: str, word: str) -> CostError:
    return CostError(f"a cluster {text!r}", f"{word!r}", "it is no count of devices, nodes or gigabits", WRITE)


def _from_file(path: Path) -> Cluster:
    try:
        given = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise CostError(f"a cluster from {path}", str(error), "the file can't be read as TOML", WRITE) from error
    known = {"cluster", "device", "inside", "outside"}
    if set(given) - known:
        raise CostError(
            f"a cluster from {path}", f"tables {', '.join(given)}", f"known are {', '.join(sorted(known))}", EXAMPLE
        )
    try:
        made = _from_line(str(given["cluster"]))
        return replace(
            made, **{name: _part(getattr(made, name), given[name]) for name in known - {"cluster"} & set(given)}
        )
    except CostError:
        raise
    except (LayoutError, KeyError, TypeError, ValueError) as error:
        raise CostError(
            f"a cluster from {path}", str(error), "a name is missing, unknown or no number", EXAMPLE
        ) from error


EXAMPLE = """cluster = "64xH100, 8 per node, 400G"
[device]
memory = 96        # GB
bandwidth = 2400   # GB/s
reach = 0.57
flops = { bf16 = 989.5, float8_e4m3fn = 1979 }  # TFLOP/s
[outside]
latency = 10       # microseconds"""
_UNITS = {"memory": GIGA, "bandwidth": GIGA, "latency": MICRO, "start": MICRO, "overhead": MICRO}


def _part(old: Any, given: Mapping[str, Any]) -> Any:
    """A device or a link with some of its numbers changed."""
    changes: dict[str, Any] = {}
    for name, value in given.items():
        if name == "flops":
            changes[name] = {**old.flops, **{read_dtype(t): float(x) * TERA for t, x in value.items()}}
        elif name in ("name", "source"):
            changes[name] = str(value)
        else:
            changes[name] = float(value) * _UNITS.get(name, 1.0)
    return replace(old, **changes)
