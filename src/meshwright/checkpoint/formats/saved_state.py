"""The state that all ranks save: one table of names, merged from the tensors and values of each rank.

Ranks of a pipeline hold different tensors, so a name needs to be on some ranks only. If two ranks differ about a name,
nothing is saved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from meshwright.layout import JsonValue, ProcessMesh, Spec, parse_spec, replicated

from .._errors import CheckpointError
from ..contents.rank_world import World
from ..files.json_values import encode_value
from .manifest import mesh_json, mesh_of
from .safetensors_file import check_dtype


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor as a rank holds it: this rank's part with the spec, or a whole plain tensor without a spec."""

    part: Tensor
    spec: Spec | None = None


@dataclass(frozen=True, slots=True)
class StateTable:
    """Everything to be saved: the spec of each tensor, and the values as JSON."""

    specs: Mapping[str, Spec]
    values: Mapping[str, Any]


def table_of(tensors: Mapping[str, HeldTensor], values: Mapping[str, Any], ranks: World) -> StateTable:
    """Return the table of all ranks. Raises CheckpointError, on every rank, for a state that cannot be saved."""
    text, _ = ranks.agreed(lambda: _text(tensors, values))
    found = ranks.all_gather_distinct(text, sha256(text.encode()).hexdigest())
    return _merged_table([(json.loads(text), members) for text, members in found.items()], ranks)


def _text(tensors: Mapping[str, HeldTensor], values: Mapping[str, Any]) -> str:
    """Return this rank's tensors and values as text."""
    meshes: list[ProcessMesh] = []
    told: dict[str, Any] = {}
    for name, held in tensors.items():
        _check_dense(name, held.part)
        check_dtype(name, held.part.dtype if held.spec is None else held.spec.dtype)
        if held.spec is None:
            plain = Spec(ProcessMesh([0]), replicated(held.part.dim()), held.part.shape, held.part.dtype)
            told[name] = [repr(plain), None]
            continue
        check_whole(name, held.spec, "to save")
        if held.spec.mesh not in meshes:
            meshes.append(held.spec.mesh)
        told[name] = [repr(held.spec), meshes.index(held.spec.mesh)]
    if twice := tensors.keys() & values.keys():
        raise CheckpointError(
            f"to save {min(twice)}",
            "a tensor and a value of that name",
            "a name has one meaning",
            "use keys that differ when they are joined by dots",
        )
    told_values = {name: encode_value(name, value) for name, value in values.items()}
    return json.dumps({"meshes": [mesh_json(m) for m in meshes], "tensors": told, "values": told_values})


def _check_dense(name: str, x: Tensor) -> None:
    """Raise CheckpointError for tensors that are not strided numbers in memory."""
    if x.layout is not torch.strided or x.is_meta or x.is_quantized:
        what = "quantized" if x.is_quantized else "on the meta device" if x.is_meta else f"of layout {x.layout}"
        raise CheckpointError(
            f"to save {name}",
            f"a tensor {what}",
            "a file holds every number of a tensor",
            "save x.to_dense(), x.dequantize(), or a tensor with values",
        )


def check_whole(name: str, spec: Spec, asked: str) -> None:
    """Raise CheckpointError for a pending reduction."""
    if spec.layout.partial:
        raise CheckpointError(
            f"{asked} {name}",
            f"{spec!r} on {spec.mesh!r}",
            "each rank has one term of the value",
            "call mw.reshard(x, x.mesh, placements) without Partial first",
        )


def _merged_table(told: Sequence[tuple[Any, list[int]]], ranks: World) -> StateTable:
    """Return one table from those of the ranks. Raises CheckpointError if two ranks differ about a name."""
    specs: dict[str, tuple[str, ProcessMesh | None]] = {}
    plain: dict[str, list[int]] = {}
    values: dict[str, Any] = {}
    first: dict[str, int] = {}
    for table, members in told:
        for name, text, mesh in _tensors_of(table):
            ranks_of_name = first.setdefault(name, members[0]), members[0]
            if name in values:
                _check_equal(name, "a value", "a tensor", ranks_of_name)
            _check_equal(name, specs.setdefault(name, (text, mesh)), (text, mesh), ranks_of_name)
            if mesh is None:
                plain.setdefault(name, []).extend(members)
        for name, value in table["values"].items():
            ranks_of_name = first.setdefault(name, members[0]), members[0]
            if name in specs:
                _check_equal(name, "a tensor", "a value", ranks_of_name)
            _check_equal(name, values.setdefault(name, value), value, ranks_of_name)
    found = {
        name: parse_spec(text, mesh or ProcessMesh(sorted(plain[name]), ["world"]))
        for name, (text, mesh) in specs.items()
    }
    _check_held_on_mesh({name: spec for name, spec in found.items() if name not in plain}, told, ranks)
    return StateTable(found, values)


def _tensors_of(table: Mapping[str, Any]) -> Iterator[tuple[str, str, ProcessMesh | None]]:
    """Yield the name, the spec and the mesh of each tensor of a rank's table; plain tensors have no mesh."""
    meshes = [mesh_of(mesh) for mesh in table["meshes"]]
    for name, (text, at) in table["tensors"].items():
        yield name, text, None if at is None else meshes[at]


def _check_held_on_mesh(specs: Mapping[str, Spec], told: Sequence[tuple[Any, list[int]]], ranks: World) -> None:
    """Raise CheckpointError if a rank of a tensor's mesh does not have the tensor."""
    for table, members in told:
        for name in specs.keys() - table["tensors"].keys():
            for rank in members:
                if rank in specs[name].mesh:
                    raise CheckpointError(
                        f"to save {name}",
                        f"rank {rank} of {ranks.size}, which does not have it",
                        f"the tensor is on {specs[name].mesh!r}",
                        "save the same state on every rank of the mesh",
                    )


def _check_equal(name: str, one: JsonValue, other: JsonValue, ranks: tuple[int, int]) -> None:
    """Raise CheckpointError if two ranks differ about a name; it shows the first item that differs."""
    if one == other:
        return
    at, a, b = _first_difference(one, other)
    raise CheckpointError(
        f"to save {name}{at}",
        f"{str(a)[:200]} on rank {ranks[0]} and {str(b)[:200]} on rank {ranks[1]}",
        "all ranks save one state",
        "use the same value on every rank, or a sharded tensor",
    )


def _first_difference(one: JsonValue, other: JsonValue, at: str = "") -> tuple[str, object, object]:
    """Return the place of the first item that differs in two values as JSON, and the items.

    >>> _first_difference({"dict": [["lr", 0.1], ["step", 3]]}, {"dict": [["lr", 0.1], ["step", 4]]})
    ('[step]', 3, 4)
    """
    first, second = _items(one), _items(other)
    if first is None or second is None:
        return at, one, other
    if [key for key, _ in first] != [key for key, _ in second]:
        return at, [key for key, _ in first], [key for key, _ in second]
    differing = ((key, a, b) for (key, a), (_, b) in zip(first, second, strict=True) if a != b)
    found = next(differing, None)  # None for a tuple and a list of the same items
    return (at, one, other) if found is None else _first_difference(*found[1:], f"{at}[{found[0]}]")


def _items(value: JsonValue) -> list[tuple[object, JsonValue]] | None:
    """Return the items of a list, a tuple or a dict in JSON, with their indices or keys; None for any other value."""
    if isinstance(value, list):
        return list(enumerate(value))
    if not isinstance(value, dict):
        return None
    if value.keys() == {"tuple"}:
        return _items(value["tuple"])
    return [(key, item) for key, item in value["dict"]] if value.keys() == {"dict"} else None
