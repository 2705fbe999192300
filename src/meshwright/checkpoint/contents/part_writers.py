"""Assign parts to the ranks that write them, from the specs alone, so that all ranks agree without communication.

A part that several ranks hold is written by one of them. Parts with one holder are assigned first. The others are
assigned in descending order of size, each to the holder with the least to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from meshwright.layout import Spec

from .index_runs import PartRuns, runs_of, volume


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A part of a tensor, and the ranks that hold it."""

    runs: PartRuns
    holders: tuple[int, ...]


@lru_cache(maxsize=65536)
def parts_of(spec: Spec) -> tuple[TensorPart, ...]:
    """Return the distinct nonempty parts of a tensor.

    >>> from meshwright.layout import ProcessMesh, parse_spec
    >>> parts_of(parse_spec("f32[3@dp]", ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])))
    (TensorPart(runs=(((0, 2),),), holders=(0, 1)), TensorPart(runs=(((2, 1),),), holders=(2, 3)))
    """
    holders: dict[PartRuns, list[int]] = {}
    for rank in spec.mesh.process_ids:
        holders.setdefault(runs_of(spec, rank), []).append(rank)
    return tuple(TensorPart(runs, tuple(ranks)) for runs, ranks in holders.items() if volume(runs))


def assign_writers(specs: Mapping[str, Spec]) -> dict[str, list[tuple[TensorPart, int]]]:
    """Return every part of every tensor, with the rank that writes it.

    >>> from meshwright.layout import ProcessMesh, parse_spec
    >>> mesh = ProcessMesh([0, 1], ["dp"])
    >>> specs = {name: parse_spec("f32[4]", mesh) for name in "abcd"}
    >>> {name: [rank for _, rank in parts] for name, parts in assign_writers(specs).items()}
    {'a': [0], 'b': [1], 'c': [0], 'd': [1]}
    """
    load: dict[int, int] = {}
    chosen: dict[str, dict[TensorPart, int]] = {name: {} for name in specs}
    found: list[tuple[int, str, TensorPart]] = []
    for name, spec in specs.items():
        for part in parts_of(spec):
            nbytes = volume(part.runs) * spec.dtype.itemsize
            found.append((nbytes, name, part))
    for nbytes, name, part in sorted(found, key=lambda item: (len(item[2].holders) > 1, -item[0])):
        rank = min(part.holders, key=lambda r: (load.get(r, 0), r))
        chosen[name][part] = rank
        load[rank] = load.get(rank, 0) + nbytes
    return {name: [(part, chosen[name][part]) for part in parts_of(spec)] for name, spec in specs.items()}
